"""A whole recording: counts, seeds, limits, and sameness with the networks' own steps."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from voicechat_core import AudioError, ContextLimitError, InputError, ModelError, VoiceChat, duplex, load
from voicechat_core.nn.conformer import ConformerEncoder, EncoderState
from voicechat_core.nn.perception import Perception
from voicechat_core.nn.rnnt import greedy_step
from voicechat_core.noise import KeyedNoise
from voicechat_core.offline import run_timeline, speech


def noise_like_speech(samples: int, seed: int = 0) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64(seed))
    slow = np.repeat(rng.uniform(0, 0.3, samples // 800 + 1), 800)[:samples]
    return (slow * rng.standard_normal(samples)).astype(np.float32)


@pytest.mark.parametrize(
    ("samples", "frames"),
    [(0, 0), (1, 1), (159, 1), (1279, 1), (1280, 1), (1281, 2), (2560, 2), (2720, 3), (13000, 11)],
)
def test_frames_are_those_of_a_padded_flush(tiny: VoiceChat, samples: int, frames: int) -> None:
    result = tiny.generate(noise_like_speech(samples))
    assert result.frames == len(result.text_tokens) == len(result.function_tokens) == frames
    assert result.audio_codes.shape == (frames, 31)
    assert result.audio.shape == (1764 * frames,)
    assert (result.audio.dtype, result.audio_codes.dtype) == (np.float32, np.int32)
    assert np.abs(result.audio).max(initial=0) <= 1
    assert (result.sample_rate, result.seconds) == (22050, frames * 0.08)


def test_a_seed_replays_to_the_bit_and_another_does_not(tiny: VoiceChat) -> None:
    samples = noise_like_speech(12000)
    first, again, other = (tiny.generate(samples, system_prompt="hi", seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(first.audio, again.audio)
    assert np.array_equal(first.audio_codes, again.audio_codes)
    assert first.text_tokens == again.text_tokens == other.text_tokens  # only the voice draws
    assert not np.array_equal(first.audio_codes, other.audio_codes)
    assert (first.seed, other.seed) == (3, 4)


def test_the_prompt_changes_the_answer_and_takes_no_frames(tiny: VoiceChat) -> None:
    samples = noise_like_speech(6400)
    plain, blank, prompted = (tiny.generate(samples, system_prompt=p) for p in (None, " \n", "Be concise."))
    assert plain.text_tokens == blank.text_tokens
    assert plain.text_tokens != prompted.text_tokens
    assert prompted.frames == plain.frames == 5


def test_extra_seconds_are_silence_after_the_recording(tiny: VoiceChat) -> None:
    samples = noise_like_speech(6400)
    extended = tiny.generate(samples, extra_decoding_seconds=0.5)
    padded = tiny.generate(np.concatenate([samples, np.zeros(8000, np.float32)]))
    assert extended.frames == 12  # ceil((6400 + 8000) / 1280)
    assert np.array_equal(extended.audio, padded.audio)


def test_max_frames_is_a_prefix(tiny: VoiceChat) -> None:
    samples = noise_like_speech(12800)
    whole, part = tiny.generate(samples), tiny.generate(samples, max_frames=4)
    assert part.text_tokens == whole.text_tokens[:4]
    assert np.array_equal(part.audio_codes, whole.audio_codes[:4])
    assert tiny.generate(samples, max_frames=0).frames == 0


def test_int16_is_the_same_as_its_floats(tiny: VoiceChat) -> None:
    pcm = (noise_like_speech(5000) * 8000).astype(np.int16)
    a, b = tiny.generate(pcm), tiny.generate(pcm.astype(np.float32) / 32768)
    assert np.array_equal(a.audio, b.audio)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": -1}, ["seed", "-1"]),
        ({"extra_decoding_seconds": -0.5}, ["extra_decoding_seconds", "-0.5"]),
        ({"extra_decoding_seconds": float("nan")}, ["extra_decoding_seconds", "nan"]),
        ({"extra_decoding_seconds": 1e308}, ["extra_decoding_seconds", "1e+308"]),
        ({"extra_decoding_seconds": None}, ["extra_decoding_seconds", "None"]),
        ({"max_frames": -2}, ["max_frames", "-2"]),
        ({"max_frames": 1.5}, ["max_frames", "1.5"]),
        ({"seed": 2**64}, ["seed", str(2**64)]),
        ({"seed": 1.0}, ["seed", "1.0"]),
        ({"system_prompt": 3}, ["system_prompt", "3"]),
        ({"system_prompt": "a\ud800"}, ["system_prompt", "surrogate", "ud800", "at 1"]),
    ],
)
def test_arguments_out_of_range(tiny: VoiceChat, arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        tiny.generate(np.zeros(1280, np.float32), **arguments)  # type: ignore[arg-type]
    assert [word for word in words if word not in str(caught.value)] == []


def test_samples_that_are_not_numbers(tiny: VoiceChat) -> None:
    with pytest.raises(AudioError):
        tiny.generate(np.array([0.0, np.nan], np.float32))


def test_more_positions_than_the_model_has(tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before the hours that listening would take."""
    monkeypatch.setattr(Perception, "__call__", None)
    frames = 131072 - 2
    with pytest.raises(ContextLimitError, match="131072") as caught:
        tiny.generate(np.zeros(frames * 1280, np.float32), system_prompt="hi")
    assert "131074 positions" in str(caught.value)  # four prompt tokens and the frames


@pytest.mark.parametrize("where", ["llm.norm_f", "lm_head", "function_head", "backbone.norm"])
def test_values_that_overflow_are_an_error_not_an_answer(plain: VoiceChat, where: str) -> None:
    root, *names = [plain.model.networks.stt_model, *where.split(".")]
    if names[0] == "backbone":
        root = plain.model.networks.tts_model.tts_model
    for name in names:
        root = getattr(root, name)
    before, root.weight = root.weight, root.weight * float("inf")
    try:
        with pytest.raises(ModelError, match=r"frame [01]: the model computed a value that is not finite"):
            plain.generate(noise_like_speech(2560))
    finally:
        root.weight = before


def test_progress_counts_prompt_and_frames(tiny_path: Path) -> None:
    """<s>, h, i, </s> and two frames; the second time the prompt's steps are there already."""
    voicechat, seen = load(tiny_path), list[tuple[int, int]]()
    for expected in ([1, 2, 3, 4, 5, 6], [4, 5, 6]):
        voicechat.generate(noise_like_speech(2560), system_prompt="hi", progress=lambda *done: seen.append(done))
        assert seen == [(done, 6) for done in expected]
        seen.clear()


def test_a_seed_may_be_numpys(tiny: VoiceChat) -> None:
    a, b = (tiny.generate(noise_like_speech(2560), seed=seed) for seed in (7, np.int64(7)))
    assert np.array_equal(a.audio, b.audio)
    assert type(b.seed) is int


def test_other_numbers_may_be_numpys_too(tiny: VoiceChat) -> None:
    samples = noise_like_speech(4000)
    assert tiny.generate(samples, max_frames=np.int16(100)).frames == 4  # type: ignore[arg-type]
    assert tiny.generate(samples, max_frames=np.uint8(2)).frames == 2  # type: ignore[arg-type]
    assert tiny.generate(samples, extra_decoding_seconds=np.float32(0.5)).frames == 10  # type: ignore[arg-type]


def test_steps_over_a_recording_equal_the_whole(tiny: VoiceChat) -> None:
    """Perception, duplex and codec one frame at a time: ids and codes equal, audio within 1e-5 eight samples later.

    The whole clip's encoder and codec run in blocks of frames, other kernels than a single frame's.
    """
    model, frames = tiny.model, 90
    samples = noise_like_speech(frames * 1280)
    noise = KeyedNoise(5, model.config.tts_config)
    whole = run_timeline(model, samples, [1, 40, 2], noise)
    stt, codec = model.networks.stt_model, model.networks.tts_model.audio_codec
    heard, sound = stt.perception.new_state(), codec.new_state()
    transcript, tokens = stt.rnnt_decoder.new_state(), []
    _, state = duplex.start(model, model.warm_up(), [1, 40, 2], noise)
    text, codes, audio = [], [], []
    for k in range(frames):
        first, last = stt.perception.samples_until(k), stt.perception.samples_until(k + 1)
        output, heard = stt.perception.step(mx.array(samples[None, first:last]), heard)
        new, transcript = greedy_step(stt.rnnt_decoder, stt.rnnt_joint, output.encoded, transcript, 10)
        tokens += new
        frame, state = duplex.step(model, output.projected, state, noise)
        out, sound = codec.step(frame.codes, sound)
        mx.eval(frame.text, frame.codes, out)
        text.append(frame.text)
        codes.append(frame.codes)
        audio.append(out)
    assert mx.array_equal(mx.concatenate(text, axis=1), whole.over_frames("text"))
    assert mx.array_equal(mx.concatenate(codes, axis=1), whole.over_frames("codes"))
    streamed = np.array(mx.concatenate(audio, axis=1)[0])
    offline = speech(model, whole.over_frames("codes"))
    assert np.abs(streamed[14:] - offline[6:-8]).max() < 1e-5
    assert model.rnnt_vocabulary.text(tokens) == tiny.generate(samples).transcript


def test_a_recording_is_encoded_in_blocks(tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frame 0 brings one mel row, every other frame eight: at most 128 frames at once, however long the recording."""
    rows, original = [], ConformerEncoder.step

    def step(encoder: ConformerEncoder, mel: mx.array, state: EncoderState) -> tuple[mx.array, EncoderState]:
        rows.append(mel.shape[1])
        return original(encoder, mel, state)

    monkeypatch.setattr(ConformerEncoder, "step", step)
    tiny.model.networks.stt_model.perception(mx.zeros((1, 300 * 1280)))
    assert rows == [1 + 8 * 127, 8 * 128, 8 * 44]


def test_memory_is_linear_in_the_length(tiny: VoiceChat) -> None:
    peaks = []
    for seconds in (15, 30):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        tiny.generate(noise_like_speech(16000 * seconds))
        peaks.append(mx.get_peak_memory() - before)
    # Twice the audio needs at most twice the memory, and a margin for block boundaries; a square would need four times.
    assert peaks[1] < 2.3 * peaks[0]


def test_a_prompt_computes_no_logits(plain: VoiceChat) -> None:
    """Nothing is chosen there, and at full size they are 1 MB a token: a head of NaNs must go unnoticed."""
    head = plain.model.networks.stt_model.lm_head
    before, head.weight = head.weight, head.weight * float("nan")
    try:
        assert plain.generate(noise_like_speech(1280), system_prompt="hi", max_frames=0).frames == 0
        with pytest.raises(ModelError, match="frame 0"):
            plain.generate(noise_like_speech(1280), system_prompt="hi")
    finally:
        head.weight = before
