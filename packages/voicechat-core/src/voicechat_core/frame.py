"""The four steps of a frame, each a function of arrays: what is heard, thought, said, and how it sounds.

Which follows which, and what stands on the channels, is ``duplex``'s and ``live``'s. Here is what MLX compiles, so
nothing here asks for a value, and shapes stay the same from frame to frame.
"""

import mlx.core as mx
import mlx.nn as nn

from voicechat_core.config import VoiceChatConfig
from voicechat_core.nn.codec import Codec, CodecState
from voicechat_core.nn.ear_tts import EarTTS, EarTtsState
from voicechat_core.nn.gemma import At
from voicechat_core.nn.linear import Embedding, Joined
from voicechat_core.nn.nemotron_h import NemotronH, NemotronHState, Slot
from voicechat_core.nn.perception import Perception, PerceptionState
from voicechat_core.nn.sampler import Draws
from voicechat_core.nn.step import Step

__all__ = ["FrameSteps"]


class FrameSteps:
    """The steps of one model, written or compiled. Each consumes the state that it is given and leaves the next in it.

    * ``perception(state, samples [1, S])`` -> encoded ``[1, 1, D]``, projected ``[1, 1, H]``
    * ``language(state, audio [1, 1, H], text [1, 1], function [1, 1], slot)`` -> both ids ``[1, 2]`` int32, the fused
      input and hidden ``[1, 1, H]``, both channels' logits ``[1, 2, V]``, whether all is finite ``[]``
    * ``speech(state, text [1, 1], codes [1, 1, Q], draws, at)`` -> codes ``[1, 1, Q]`` int32, whether all is finite
    * ``codec(state, codes [1, 1, Q], text, function, finite)`` -> all that the host wants of a frame, in one float32
      row (so that it waits once): 1,764 samples, Q codes, both ids, and 1 where all is finite. Ids are exact there.
    """

    def __init__(
        self, config: VoiceChatConfig, networks: nn.Module, subword_table: mx.array, *, compiled: bool
    ) -> None:
        stt, tts = networks.stt_model, networks.tts_model
        self._config, self._subword_table = config, subword_table
        self._hear: Perception = stt.perception
        self._embed: Embedding = stt.embed_tokens
        self._trunk: NemotronH = stt.llm
        self._heads = Joined(stt.lm_head, stt.function_head)
        self._voice: EarTTS = tts.tts_model
        self._codec: Codec = tts.audio_codec
        self._silence = tts.codec_silence_tokens.astype(mx.int32)
        mx.eval(self._silence)
        self.perception = Step(self._perceive, compiled=compiled)
        self.language = Step(self._think, compiled=compiled)
        self.speech = Step(self._speak, compiled=compiled)
        self.codec = Step(self._sound, compiled=compiled)

    def fused(self, audio: mx.array, text: mx.array, function: mx.array) -> mx.array:
        """The trunk's input ``[1, n, H]``: audio, or a prompt's embeddings, and both histories ``[1, n]``."""
        return audio + self._embed(text) + self._config.function_channel_weight * self._embed(function)

    def _perceive(self, state: PerceptionState, samples: mx.array) -> tuple[tuple[mx.array, mx.array], PerceptionState]:
        heard, state = self._hear.step(samples, state)
        return (heard.encoded, heard.projected), state

    def _think(
        self, state: NemotronHState, audio: mx.array, text: mx.array, function: mx.array, at: Slot | None
    ) -> tuple[tuple[mx.array, ...], NemotronHState]:
        inputs = self.fused(audio, text, function)
        hidden, state = self._trunk.decode(inputs, state, at)
        logits = mx.unflatten(self._heads(hidden), -1, (2, -1))[:, 0]
        ids = mx.argmax(logits, axis=-1).astype(mx.int32)
        # A hidden value that is not a number makes every logit one.
        return (ids, inputs, hidden, logits, _finite(logits)), state

    def _speak(
        self, state: EarTtsState, text: mx.array, codes: mx.array, draws: Draws, at: tuple[At, ...]
    ) -> tuple[tuple[mx.array, mx.array], EarTtsState]:
        """What it hears of itself is its last frame, but silence when a turn ends, for that step only."""
        ended = (text == self._config.eos_token_id)[..., None]
        previous = mx.where(ended, self._silence, codes)
        codes, hidden, state = self._voice.decode(self._subword_table[text], previous, draws, state, at)
        return (codes, _finite(hidden)), state

    def _sound(
        self, state: CodecState, codes: mx.array, text: mx.array, function: mx.array, finite: mx.array
    ) -> tuple[mx.array, CodecState]:
        sound, state = self._codec.step(self._codec.replace_control_codes(codes, self._silence), state)
        finite = finite & _finite(sound)
        numbers = [x.reshape(1, -1).astype(mx.float32) for x in (sound, codes, text, function, finite)]
        return mx.concatenate(numbers, axis=1), state


def _finite(x: mx.array) -> mx.array:
    return mx.isfinite(x).all()
