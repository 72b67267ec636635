"""What a session holds, in bytes, by the shapes of its state: nothing is run and nothing is waited for.

A state is what does not grow (the state space layers, convolutions, perception's window) and the keys and values of
past positions: the language model's of prompt and frames, the speech decoder's of the voice prompt and what follows.
Buffers of keys and values have room for up to twice what is in them, and for at least 256 positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

from voicechat_core.model import VoiceChatModel
from voicechat_core.nn import state as states
from voicechat_core.nn.kv_cache import KVCache
from voicechat_core.profile import FRAME_MS

__all__ = ["Growth", "filled_bytes"]

FRAMES_A_MINUTE = round(60_000 / FRAME_MS)


@dataclass(frozen=True)
class Growth:
    """What each position adds to a session, for ever: in the language model, and in the speech decoder.

    Every frame is one position of both; every token of a prompt is one of the first, and with ``tts_prompt_steps``,
    but for the first token, one of the second. A layer of the speech decoder with a window stops when that is full (at
    10 minutes, where it is the published one), and all of them with ``tts_context_frames`` when that is. Layers whose
    window is full within the first minute are left out.
    """

    language: int
    speech: int

    @classmethod
    def of(cls, model: VoiceChatModel) -> "Growth":
        """Of a model's sessions: twice heads, width and layers of every attention, by the size of a number."""
        voice = model.networks.tts_model.tts_model
        windows = [layer.self_attn.window for layer in voice.backbone.layers]
        growing = [
            cache
            for cache, window in zip(voice.new_state().caches, windows, strict=True)
            if window is None or window >= FRAMES_A_MINUTE
        ]
        return cls(_a_position(model.networks.stt_model.llm.new_state(1)), _a_position(growing))

    @property
    def a_minute(self) -> int:
        """Bytes of 750 frames."""
        return FRAMES_A_MINUTE * (self.language + self.speech)


def _a_position(state: object) -> int:
    return sum(_slot_bytes(cache) for cache in _caches(state))


def _slot_bytes(cache: KVCache) -> int:
    """Of keys and values of one position."""
    batch, heads, _, width = cache.keys.shape
    return int(2 * batch * heads * width * cache.keys.dtype.size)


def _caches(value: object) -> Iterator[KVCache]:
    if isinstance(value, KVCache):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _caches(item)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _caches(getattr(value, each.name))


def filled_bytes(state: object) -> int:
    """Bytes of a state without the empty slots of its keys and values."""
    empty = sum((cache.keys.shape[2] - cache.length) * _slot_bytes(cache) for cache in _caches(state))
    return states.nbytes(state) - empty
