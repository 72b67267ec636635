"""A whole recording at once: perception over the clip, the duplex step a frame, then the codec over all codes.

``generate`` gives what a live session gives after a padded flush: ceil(samples / 1280) frames. With
``nvidia_edges`` the edges are those of NVIDIA's offline run instead: its frame count, its masked last mel frame and
code id 0 at time 0. That is what goldens are compared with.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from voicechat_core import duplex
from voicechat_core.arguments import check_arguments, check_flags, check_positions, check_tools, heard_samples, whole
from voicechat_core.duplex import DuplexState, Frame
from voicechat_core.errors import ModelError
from voicechat_core.model import VoiceChatModel
from voicechat_core.nn import state as states
from voicechat_core.nn.perception import PerceptionOutput
from voicechat_core.nn.rnnt import greedy_decode
from voicechat_core.nn.subsampling import encoded_length
from voicechat_core.noise import KeyedNoise, Noise, check_seed
from voicechat_core.prompt import PromptStates
from voicechat_core.tokenizer import SpecialIds
from voicechat_core.tools import AnsweredTools, ToolChannel, ToolFunctions

__all__ = ["GenerationResult", "Progress", "Timeline", "generate", "run_timeline", "speech"]

Progress = Callable[[int, int], None]  # positions done, positions in all: prompt tokens and frames


@dataclass(frozen=True)
class GenerationResult:
    """What one recording gave, on one timeline of 80 ms frames.

    ``transcript`` is what the user said, or None where the checkpoint has no transcript branch. ``text`` and
    ``function_text`` are the assistant's two channels, turns of text a space apart; ``text_tokens`` and
    ``function_tokens`` are their ids, one a frame, PAD included. ``audio_codes`` is int32 ``[frames, Q]``; ``audio``
    float32 mono in [-1, 1] at ``sample_rate`` hertz, 1764 samples a frame; ``seconds`` its length.
    ``tts_prompt_steps`` and ``tts_context_frames`` are what the speech decoder was run with.
    """

    transcript: str | None
    text: str
    function_text: str
    text_tokens: list[int]
    function_tokens: list[int]
    audio_codes: np.ndarray
    audio: np.ndarray
    frames: int
    sample_rate: int
    seed: int
    tts_prompt_steps: bool
    tts_context_frames: int | None
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """Every position of a run: the prompt's in one frame, if it was run, then the audio's, a frame each."""

    prompt: Frame | None
    frames: list[Frame]
    encoded: mx.array  # [1, F, D], the encoder output that the transcript is decoded from

    def over_all(self, name: str) -> mx.array:
        """One field over every position: ``[1, P + F, ...]``; there must be at least one."""
        return mx.concatenate([getattr(frame, name) for frame in (self.prompt, *self.frames) if frame], axis=1)

    def over_frames(self, name: str) -> mx.array:
        """One field over the audio frames: ``[1, F, ...]``; there must be at least one."""
        return mx.concatenate([getattr(frame, name) for frame in self.frames], axis=1)


def run_timeline(
    model: VoiceChatModel,
    samples: np.ndarray,
    prompt_ids: list[int],
    noise: Noise,
    *,
    nvidia_edges: bool = False,
    keep_logits: bool = False,
    opening: DuplexState | None = None,
    tools: AnsweredTools | None = None,
    progress: Progress | None = None,
) -> Timeline:
    """Perception over 16 kHz float32 ``samples`` ``[S]``, then one duplex step a frame.

    ``opening`` is the timeline after the prompt, to be consumed; without one the prompt is run here, with its draws
    from ``noise``. ``tools`` answer what the model calls. Logits, hidden states and fused inputs are kept only on
    demand: at full size they are 1 MB a frame.
    """
    heard = model.networks.stt_model.perception(mx.array(samples)[None], nvidia_edges=nvidia_edges)
    count = heard.encoded.shape[1]
    check_positions(model, len(prompt_ids), count)
    if nvidia_edges and prompt_ids:
        heard = _without_padding(model, heard, len(samples))
    codes_at_zero = _nvidia_codes_at_zero(model) if nvidia_edges else None
    done = (lambda position: progress(position, len(prompt_ids) + count)) if progress is not None else None
    prompt, state = None, opening
    if state is None:
        prompt, state = duplex.start(model, model.warm_up(), prompt_ids, noise, codes_at_zero, done)
    if prompt is not None and not prompt.finite.item():
        raise ModelError("the system prompt: the model computed a value that is not finite")
    frames = []
    for index in range(count):
        audio = heard.projected[:, index : index + 1]
        forced = None if tools is None else tools.forced()
        frame, state = duplex.step(model, audio, state, noise, codes_at_zero, forced=forced)
        mx.eval(frame.finite, frame.text, frame.function, frame.codes, [x for _, x in states.arrays(state)])
        if not frame.finite.item():
            raise ModelError(f"frame {index}: the model computed a value that is not finite")
        frames.append(frame if keep_logits else _ids_only(frame))
        if tools is not None:
            tools.took(index, int(np.array(frame.function)[0, 0]))
        if done is not None:
            done(state.position)
    kept = prompt if prompt is None or keep_logits else _ids_only(prompt)
    return Timeline(kept, frames, heard.encoded)


def _nvidia_codes_at_zero(model: VoiceChatModel) -> mx.array:
    """NVIDIA's code array is never written at time 0: id 0 in every level, an arbitrary burst, not silence."""
    return mx.zeros_like(model.silence_codes)


def _without_padding(model: VoiceChatModel, heard: PerceptionOutput, samples: int) -> PerceptionOutput:
    """NVIDIA copies only valid frames behind a prompt: a padding frame is then heard as zeros, not as encoded."""
    valid = encoded_length(samples // model.config.audio_config.preprocessor.hop_samples)
    inside = mx.arange(heard.projected.shape[1])[:, None] < valid
    return PerceptionOutput(heard.encoded, mx.where(inside, heard.projected, 0))


def _ids_only(frame: Frame) -> Frame:
    none = mx.zeros((1, 0, 0))
    return Frame(frame.text, frame.function, frame.codes, none, none, none, none, frame.finite)


def speech(model: VoiceChatModel, codes: mx.array) -> np.ndarray:
    """Codes ``[1, T, Q]`` to float32 samples ``[T * 1764]``; control codes sound as silence."""
    codec = model.networks.tts_model.audio_codec
    audible = codec.replace_control_codes(codes, model.networks.tts_model.codec_silence_tokens)
    return np.array(codec.decode(audible)[0], dtype=np.float32)


def transcribe(model: VoiceChatModel, encoded: mx.array) -> str | None:
    """The user's words from encoder frames ``[1, T, D]``; None where the checkpoint has no transcript branch."""
    vocabulary, stt = model.rnnt_vocabulary, model.networks.stt_model
    if not vocabulary.enabled:
        return None
    tokens, _ = greedy_decode(
        stt.rnnt_decoder, stt.rnnt_joint, encoded, model.config.audio_config.max_symbols, vocabulary.special
    )
    return vocabulary.text(tokens)


def generate(
    prompts: PromptStates,
    samples: np.ndarray,
    *,
    system_prompt: str | None = None,
    seed: int = 0,
    extra_decoding_seconds: float = 0.0,
    max_frames: int | None = None,
    tts_prompt_steps: bool = True,
    tts_context_frames: int | None = None,
    tools: ToolFunctions | None = None,
    progress: Progress | None = None,
) -> GenerationResult:
    """Answer a recording.

    Args:
        prompts: the loaded checkpoint's opening states.
        samples: float32 mono at 16 kHz, ``[S]``, finite.
        system_prompt: None for the checkpoint's own, blank for none.
        seed: of the speech decoder's draws; the same seed gives the same result on one machine.
        extra_decoding_seconds: silence to listen to after the recording, so that an answer can finish.
        max_frames: stop after this many frames; None for all.
        tts_prompt_steps: whether the speech decoder takes its steps over the system prompt, as NVIDIA's offline run
            does; its live pipeline does not.
        tts_context_frames: let the speech decoder look back at the voice prompt and this many positions only (frames,
            and before them its steps over the system prompt); None for all of them, which is exact.
        tools: functions by name that answer what the model calls; None lets it make the responses up. One that fails is
            logged, and the model reads an error.
        progress: called with the positions done and the positions in all: prompt tokens and frames.

    Raises:
        InputError: for an argument out of range.
        ContextLimitError: when prompt and frames exceed the model's positions.
        ModelError: when the model computes something that is not a number.
    """
    check_arguments(system_prompt, seed, extra_decoding_seconds, max_frames, tts_context_frames)
    check_flags(tts_prompt_steps=tts_prompt_steps)
    check_tools(tools)
    # Python's own numbers from here on: NumPy's small integers wrap around.
    seed, max_frames, tts_context_frames = check_seed(seed), whole(max_frames), whole(tts_context_frames)
    model = prompts.model
    prompt_ids = model.prompt_ids(system_prompt)
    length = heard_samples(model, len(samples), float(extra_decoding_seconds), max_frames)
    count = -(-length // model.config.input_frame_samples)
    check_positions(model, len(prompt_ids), count)
    heard = np.pad(samples[:length], (0, max(0, length - len(samples))))
    opening = prompts.opening(
        prompt_ids,
        tts_prompt_steps=tts_prompt_steps,
        tts_context_frames=tts_context_frames,
        after_each=None if progress is None else lambda position: progress(position, len(prompt_ids) + count),
    )
    noise = KeyedNoise(seed, model.config.tts_config, compiled=model.compiled)
    answered = None if tools is None else AnsweredTools(ToolChannel(model.tokenizer, model.config), tools)
    timeline = run_timeline(model, heard, prompt_ids, noise, opening=opening, tools=answered, progress=progress)
    return _result(model, timeline, seed, bool(tts_prompt_steps), tts_context_frames)


def _result(
    model: VoiceChatModel, timeline: Timeline, seed: int, tts_prompt_steps: bool, tts_context_frames: int | None
) -> GenerationResult:
    tokenizer, hidden = model.tokenizer, SpecialIds.of(model.tokenizer, model.config).hidden
    text = [int(i) for frame in timeline.frames for i in np.array(frame.text).flat]
    function = [int(i) for frame in timeline.frames for i in np.array(frame.function).flat]
    quantizers = model.config.tts_config.num_quantizers
    codes = timeline.over_frames("codes") if timeline.frames else mx.zeros((1, 0, quantizers), mx.int32)
    audio = speech(model, codes)
    return GenerationResult(
        transcript=transcribe(model, timeline.encoded),
        text=tokenizer.visible_text(text, hidden, model.config.bos_token_id),
        function_text=tokenizer.visible_text(function, hidden),
        text_tokens=text,
        function_tokens=function,
        audio_codes=np.array(codes[0], dtype=np.int32),
        audio=audio,
        frames=len(text),
        sample_rate=model.config.output_sample_rate,
        seed=seed,
        tts_prompt_steps=tts_prompt_steps,
        tts_context_frames=tts_context_frames,
        seconds=len(audio) / model.config.output_sample_rate,
    )
