"""What the listening half is to learn from a batch of windows: the transcript, the text and the function channel.

    L = 6 * transducer / frames + text + function         both channels' cross entropies by the windows' weights

Inputs stand exactly where a session has them: a system prompt right before the first frame, both channels' ids of the
position before, PAD where there was none.
"""

from collections.abc import Callable

import mlx.core as mx

from training.listening import network
from training.listening.augment import hide_parts, in_a_room
from training.listening.lstm import predictions
from training.listening.network import Dropout, one_hot
from training.listening.rnnt_loss import transducer_loss
from training.listening.tables import Table, rows, sound
from training.listening.timeline import BOS, PAD
from voicechat_core.config import VoiceChatConfig
from voicechat_core.model import SttModel

__all__ = ["TRANSCRIPT_WEIGHT", "batch_of", "hear", "listening_loss", "losses", "window_hidden"]

TRANSCRIPT_WEIGHT = 6.0

Terms = dict[str, mx.array]


def listening_loss(config: VoiceChatConfig, dropout: float) -> Callable[[SttModel, mx.array, Table], Terms]:
    """The loss of what ``batch_of`` gives."""
    return lambda stt, mel, batch: losses(stt, config, mel, batch, Dropout(dropout))


def batch_of(stt: SttModel, samples: mx.array, table: Table, index: mx.array) -> tuple[mx.array, Table]:
    """The rows ``index`` of a table, and their mel rows as they sound in some room.

    It stays outside of the compiled step: it has no weights and runs once, so fusing it would only cost the compiling
    of some twenty kernels.
    """
    batch = rows(table, index)
    room = in_a_room(sound(samples, batch))
    return hide_parts(hear(stt, room, batch["text"].shape[1])), batch


def hear(stt: SttModel, samples: mx.array, frames: int) -> mx.array:
    """The mel rows of ``frames`` frames from the start of ``samples`` ``[B, N]``."""
    return network.log_mel(stt.perception.preprocessor, samples[:, : network.samples_of(frames)])


def losses(stt: SttModel, config: VoiceChatConfig, mel: mx.array, batch: Table, drop: Dropout) -> Terms:
    """The weighted terms, and how often text is right where it counts."""
    encoded = network.encode(stt.perception.encoder, mel, drop)
    hidden = window_hidden(stt, config, stt.perception.proj(encoded), batch, drop)
    text, text_right = _cross_entropy(stt.lm_head(hidden), batch["text"], batch["text_weight"])
    function, _ = _cross_entropy(stt.function_head(hidden), batch["function"], batch["function_weight"])
    is_answer = (batch["text"] != PAD).astype(mx.float32)
    is_begin = (batch["text"] == BOS).astype(mx.float32)
    return {
        "rnnt": TRANSCRIPT_WEIGHT * _transcript_loss(stt, encoded, batch),
        "text": text,
        "function": function,
        "_right": (text_right * is_answer).sum() / mx.maximum(is_answer.sum(), 1),
        "_begins": (text_right * is_begin).sum() / mx.maximum(is_begin.sum(), 1),
    }


def window_hidden(stt: SttModel, config: VoiceChatConfig, audio: mx.array, batch: Table, drop: Dropout) -> mx.array:
    """The trunk's hidden ``[B, T, H]`` of frames whose past is what ``batch`` says, behind their prompts."""
    prompt, length = batch["prompt"], batch["prompt_length"][:, None]
    places = prompt.shape[1]
    audio = mx.concatenate([one_hot(prompt, stt.embed_tokens.weight.shape[0]) @ stt.embed_tokens.weight, audio], axis=1)
    before = [(0, 0), (places + 1, 0)]
    text, function = (mx.pad(batch[name][:, :-1], before, constant_values=PAD) for name in ("text", "function"))
    real = mx.arange(audio.shape[1]) >= places - length
    x = network.fuse(stt, audio, text, function, config.function_channel_weight)
    return network.think(stt.llm, x * real[..., None], real, drop)[:, places:]


def _transcript_loss(stt: SttModel, encoded: mx.array, batch: Table) -> mx.array:
    """Mean over windows, by frame."""
    joint, labels = stt.rnnt_joint, batch["labels"]
    frames = joint.project_frames(encoded)[:, :, None]
    said = joint.project_prediction(predictions(stt.rnnt_decoder, labels))[:, None]
    losses = transducer_loss(joint.fuse(frames, said), labels, batch["lengths"])
    return losses.mean() / encoded.shape[1]


def _cross_entropy(logits: mx.array, targets: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
    """The weighted mean, and 1.0 where the target is the best choice ``[B, T]``."""
    of_target = (logits * one_hot(targets, logits.shape[-1])).sum(axis=-1)
    entropy = mx.logsumexp(logits, axis=-1) - of_target
    return (entropy * weights).sum() / weights.sum(), (of_target >= logits.max(axis=-1)).astype(mx.float32)
