"""The four steps of a frame, each a function of arrays: what is heard, thought, said, and how it sounds.

Which follows which, and what stands on the channels, is ``duplex``'s and ``live``'s. Here is what MLX compiles, so
nothing here asks for a value, and shapes stay the same from frame to frame.
"""

import mlx.core as mx
import mlx.nn as nn

from voicechat_core.config import VoiceChatConfig
from voicechat_core.nn import state as states
from voicechat_core.nn.codec import Codec, CodecState
from voicechat_core.nn.ear_tts import EarTTS, EarTtsState
from voicechat_core.nn.gemma import At
from voicechat_core.nn.kv_cache import KVCache
from voicechat_core.nn.linear import Embedding, Joined
from voicechat_core.nn.nemotron_h import NemotronH, NemotronHState, Slot
from voicechat_core.nn.perception import Perception, PerceptionState
from voicechat_core.nn.sampler import Draws
from voicechat_core.nn.step import Step

__all__ = ["FrameFunctions", "FrameSteps", "fused"]


def fused(embed: Embedding, weight: float, audio: mx.array, text: mx.array, function: mx.array) -> mx.array:
    """The trunk's input ``[1, n, H]``: audio, or a prompt's embeddings, and both histories ``[1, n]``."""
    return audio + embed(text) + weight * embed(function)


class FrameFunctions:
    """The four functions of one model's networks; each consumes the state that it is given."""

    def __init__(self, config: VoiceChatConfig, networks: nn.Module, subword_table: mx.array) -> None:
        stt, tts = networks.stt_model, networks.tts_model
        self.config = config
        self.hearing: Perception = stt.perception
        self.trunk: NemotronH = stt.llm
        self.voice: EarTTS = tts.tts_model
        self._embed: Embedding = stt.embed_tokens
        self._heads = Joined(stt.lm_head, stt.function_head)
        self._heads.ready()
        self._codec: Codec = tts.audio_codec
        self._subword_table = subword_table
        self._silence = tts.codec_silence_tokens.astype(mx.int32)
        mx.eval(self._silence, subword_table)  # constants of compiled steps

    def perceive(self, state: PerceptionState, samples: mx.array) -> tuple[tuple[mx.array, mx.array], PerceptionState]:
        """Samples ``[1, S]`` -> encoded ``[1, 1, D]`` and projected ``[1, 1, H]``."""
        heard, state = self.hearing.step(samples, state)
        return (heard.encoded, heard.projected), state

    def think(
        self, state: NemotronHState, audio: mx.array, text: mx.array, function: mx.array, at: Slot | None
    ) -> tuple[tuple[mx.array, ...], NemotronHState]:
        """Projected audio ``[1, 1, H]``, both histories ``[1, 1]`` and the reserved slot -> both ids ``[1, 2]`` int32,
        the fused input and hidden ``[1, 1, H]``, both channels' logits ``[1, 2, V]``, whether all is finite ``[]``.
        """
        inputs = fused(self._embed, self.config.function_channel_weight, audio, text, function)
        hidden, state = self.trunk.decode(inputs, state, at)
        logits = mx.unflatten(self._heads(hidden), -1, (2, -1))[:, 0]
        ids = mx.argmax(logits, axis=-1).astype(mx.int32)
        # A hidden value that is not a number makes every logit one.
        return (ids, inputs, hidden, logits, _finite(logits)), state

    def speak(
        self, state: EarTtsState, text: mx.array, codes: mx.array, draws: Draws, at: tuple[At, ...]
    ) -> tuple[tuple[mx.array, mx.array], EarTtsState]:
        """The text id ``[1, 1]``, previous codes ``[1, 1, Q]``, draws, the reserved places -> codes ``[1, 1, Q]``
        int32 and whether all is finite.
        """
        condition, previous = self._subword_table[text], self.previous(text, codes)
        codes, hidden, state = self.voice.decode(condition, previous, draws, state, at)
        return (codes, _finite(hidden)), state

    def previous(self, text: mx.array, codes: mx.array) -> mx.array:
        """What the voice hears of itself: its last frame, but silence when a turn ends, for that step only."""
        ended = (text == self.config.eos_token_id)[..., None]
        return mx.where(ended, self._silence, codes)

    def sound(
        self, state: CodecState, codes: mx.array, text: mx.array, function: mx.array, finite: mx.array
    ) -> tuple[mx.array, CodecState]:
        """Codes ``[1, 1, Q]`` -> all that the host wants of a frame, so that it waits once: a float32 row ``[1, N]`` of
        1,764 samples, Q codes, both ids, and 1 where all is finite. Numbers of that size are exact in it.
        """
        sound, state = self._codec.step(self._codec.replace_control_codes(codes, self._silence), state)
        finite = finite & _finite(sound)
        numbers = [x.reshape(1, -1).astype(mx.float32) for x in (sound, codes, text, function, finite)]
        return mx.concatenate(numbers, axis=1), state


class FrameSteps:
    """The four functions as steps, written or compiled: called with a state, which becomes the next one."""

    def __init__(self, functions: FrameFunctions, *, compiled: bool) -> None:
        self._functions = functions
        self.perception = Step(functions.perceive, compiled=compiled)
        self.language = Step(functions.think, compiled=compiled)
        self.speech = Step(functions.speak, compiled=compiled)
        self.codec = Step(functions.sound, compiled=compiled)
        self._mostly_used: set[tuple[object, ...]] = set()  # buffers that were seen so, and what follows prepared for

    def prepare_next(self, llm: NemotronHState, speech: EarTtsState) -> None:
        """Compile for the capacities that keys and values will have next, once most of the present ones is used.

        Called while the device computes a frame and the host would only wait; at most one step at a time.
        """
        if not self.language.compiled:
            return
        attention = [layer for layer in llm.layers if isinstance(layer, KVCache)]
        if self._is_news(attention) and (larger := self._functions.trunk.grown(llm)) is not None:
            self._for_language(larger)
        elif self._is_news(speech.caches) and (later := self._functions.voice.grown(speech)) is not None:
            self._for_speech(later)

    def _is_news(self, caches: list[KVCache]) -> bool:
        """Whether these are mostly used and it is the first time that such are: once for each set of capacities."""
        kinds = tuple((cache.keys.shape, cache.newest, cache.pinned) for cache in caches)
        if kinds in self._mostly_used or not _mostly_used(caches):
            return False
        self._mostly_used.add(kinds)
        return True

    def prepare_all(self, llm: NemotronHState, speech: EarTtsState) -> None:
        """Compile for every capacity from the present ones to those that the model's positions need."""
        last = 2 * self._functions.config.text_config.max_position_embeddings
        larger: NemotronHState | None = llm
        while self.language.compiled and larger is not None and _capacity(larger) < last:
            self._for_language(larger)
            larger = self._functions.trunk.grown(larger)
        later: EarTtsState | None = speech
        while self.speech.compiled and later is not None and _capacity(later) < last:
            self._for_speech(later)
            later = self._functions.voice.grown(later)

    def _for_language(self, state: NemotronHState) -> bool:
        """Compile for a state like this one, which stays as it is. False if that was done before."""
        functions, state = self._functions, states.map_arrays(lambda x: x, state)  # with counters of its own
        hidden = functions.config.text_config.hidden_size
        audio, ids = mx.zeros((1, 1, hidden), functions.hearing.proj.dtype), mx.zeros((1, 1), mx.int32)
        return self.language.prepare(state, audio, ids, ids, functions.trunk.reserve(state))

    def _for_speech(self, state: EarTtsState) -> bool:
        functions, state = self._functions, states.map_arrays(lambda x: x, state)
        tts, passes = functions.config.tts_config, len(functions.voice.passes)
        codes = mx.zeros((1, 1, tts.num_quantizers), mx.int32)
        draws = mx.zeros((passes, tts.mog_head.num_predictions)), mx.zeros((passes, tts.latent_size))
        return self.speech.prepare(state, codes[..., 0], codes, draws, functions.voice.reserve(state))


def _mostly_used(caches: list[KVCache]) -> bool:
    """Whether a quarter of some buffer is left, or less."""
    return any(4 * cache.length >= 3 * cache.keys.shape[2] for cache in caches)


def _capacity(state: object) -> int:
    return max((cache.keys.shape[2] for cache in states.parts(KVCache, state)), default=0)


def _finite(x: mx.array) -> mx.array:
    return mx.isfinite(x).all()
