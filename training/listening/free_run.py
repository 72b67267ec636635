"""Whole recordings through the project's own networks, many at a time: what is heard, written down and answered.

The trunk goes position by position on its own ids, as ``voicechat_core.duplex`` does; a tool's response is forced onto
the function channel behind its call, as a server does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training.listening import network
from training.listening.timeline import CALL, CALL_END, PAD, SAMPLES
from voicechat_core.config import VoiceChatConfig
from voicechat_core.model import SttModel

__all__ = ["Said", "converse", "hear", "transcribe"]

Ids = NDArray[np.int32]
AT_ONCE = 48  # recordings that perception takes together


@dataclass(frozen=True)
class Said:
    """Both channels' ids ``[B, T]``."""

    text: Ids
    function: Ids


def hear(stt: SttModel, recordings: NDArray[np.float32]) -> tuple[mx.array, mx.array]:
    """Recordings ``[B, 1280 T]`` -> encoder frames ``[B, T, D]`` and what the trunk hears of them ``[B, T, H]``."""
    frames, parts = recordings.shape[1] // SAMPLES, []
    for start in range(0, len(recordings), AT_ONCE):
        samples = mx.array(recordings[start : start + AT_ONCE, : network.samples_of(frames)])
        mel = network.log_mel(stt.perception.preprocessor, samples)
        parts.append(network.encode(stt.perception.encoder, mel, network.Dropout()))
        mx.eval(parts[-1])
    encoded = mx.concatenate(parts)
    return encoded, stt.perception.proj(encoded)


def transcribe(stt: SttModel, encoded: mx.array, most: int = 10) -> list[list[int]]:
    """The labels of each recording, by the greedy search that is served; at most ``most`` a frame."""
    decoder, joint = stt.rnnt_decoder, stt.rnnt_joint
    frames = joint.project_frames(encoded)
    batch, blank = encoded.shape[0], joint.blank
    state = decoder.new_state(batch)
    said, h, c = decoder.step(None, state.h, state.c)
    said, labels = joint.project_prediction(said), [list[int]() for _ in range(batch)]
    mx.eval(frames, said, h, c)
    for t in range(encoded.shape[1]):
        waiting = np.zeros(batch, bool)  # for the next frame
        for _ in range(most):
            best = np.array(mx.argmax(joint.fuse(frames[:, t], said), axis=-1))
            waiting |= best == blank
            if waiting.all():
                break
            for row in np.flatnonzero(~waiting):
                labels[row].append(int(best[row]))
            # Rows that said nothing keep their state.
            goes_on = mx.array(~waiting)[:, None]
            after, h2, c2 = decoder.step(mx.array(np.where(waiting, 0, best)), h, c)
            h, c = mx.where(goes_on, h2, h), mx.where(goes_on, c2, c)
            said = mx.where(goes_on, joint.project_prediction(after), said)
    return labels


def converse(
    stt: SttModel,
    config: VoiceChatConfig,
    heard: mx.array,
    prompt: Sequence[int] = (),
    responses: Sequence[Sequence[int]] | None = None,
) -> Said:
    """What is said to ``heard`` ``[B, T, H]``, all after the same prompt; ``responses`` are the tools'."""
    batch = heard.shape[0]
    pad = mx.full((batch, 1), PAD, dtype=mx.int32)
    state = stt.llm.new_state(batch)
    if prompt:
        ids = mx.array([list(prompt)] * batch, mx.int32)
        pads = mx.full(ids.shape, PAD, dtype=mx.int32)
        _, state = stt.llm.step(_inputs(stt, config, stt.embed_tokens(ids), pads, pads), state)
    text, function, server = pad, pad, _Server(responses or [()] * batch)
    texts, functions = [], []
    for t in range(heard.shape[1]):
        hidden, state = stt.llm.step(_inputs(stt, config, heard[:, t : t + 1], text, function), state)
        text = mx.argmax(stt.lm_head(hidden), axis=-1).astype(mx.int32)
        chosen = mx.argmax(stt.function_head(hidden), axis=-1)
        functions.append(server.forced(np.array(chosen)[:, 0]))
        function = mx.array(functions[-1])[:, None]
        texts.append(text)
    return Said(np.array(mx.concatenate(texts, axis=1)), np.stack(functions, axis=1))


def _inputs(stt: SttModel, config: VoiceChatConfig, audio: mx.array, text: mx.array, function: mx.array) -> mx.array:
    return audio + stt.embed_tokens(text) + config.function_channel_weight * stt.embed_tokens(function)


SLOWEST = 9  # frames that a tool takes at most; each recording's another


class _Server:
    """The function channel's other side: a while behind the end of a call it writes the response, once, id by id."""

    def __init__(self, responses: Sequence[Sequence[int]]) -> None:
        self._ready: list[list[int]] = [list(ids) for ids in responses]
        self._writing: list[list[int]] = [[] for _ in responses]
        self._calling = [False] * len(responses)

    def forced(self, chosen: NDArray[Any]) -> Ids:
        """What stands on the channel: the server's id where it writes, else the model's own choice ``[B]``."""
        result = chosen.astype(np.int32)
        for row, token in enumerate(result):
            if self._writing[row]:
                result[row] = self._writing[row].pop(0)
            elif token == CALL:
                self._calling[row] = True
            elif token == CALL_END and self._calling[row]:
                self._calling[row] = False
                if self._ready[row]:
                    self._writing[row] = [PAD] * (row % (SLOWEST + 1)) + self._ready[row]
                self._ready[row] = []
        return result
