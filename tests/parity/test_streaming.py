"""The live session against the whole clip, and against NVIDIA's end-to-end goldens."""

from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import GOLDEN_FOLDERS, SMALL_FOLDER, goldens_of
from voicechat_core import AudioFrame, Event, TranscriptDelta, VoiceChat, duplex, live, load
from voicechat_core.noise import RecordedNoise
from voicechat_core.session import Session, SessionOptions
from voicechat_core.streaming import collect, events_of
from voicechat_core.verify import tolerance

FRAMES = 130
CHUNK = 1024  # a sound card's; divides no frame
RUNS = ("e2e_plain", "e2e_prompt")
SILENT = {(SMALL_FOLDER, "e2e_prompt")}  # its sound is left out of the folder, which is small
# Two frames of the codec's coarsest stage reach two frames back, its finer stages less: after four, what NVIDIA put at
# time 0 is out of sight.
REACH = 4


@pytest.fixture(scope="module", params=GOLDEN_FOLDERS, ids=lambda path: path.name)
def voicechat(request: pytest.FixtureRequest) -> VoiceChat:
    return loaded(request.param)


@cache
def loaded(folder: Path) -> VoiceChat:
    return load(goldens_of(folder).checkpoint(), precision="float32")


def speech_like(frames: int) -> np.ndarray:
    rng = np.random.default_rng(4)
    loudness = np.repeat(rng.uniform(0, 0.3, frames * 2), 640)
    return (loudness * rng.standard_normal(frames * 1280)).astype(np.float32)


@pytest.mark.parametrize("samples", [FRAMES * 1280, FRAMES * 1280 - 700])
@pytest.mark.parametrize("prompt", ["", "Be concise."])
def test_streaming_is_the_whole_clip(voicechat: VoiceChat, prompt: str, samples: int) -> None:
    """Ids, transcript and codes on all frames; the audio within the codec's tolerance from its seventh sample on."""
    wav = speech_like(FRAMES)[:samples]
    offline = voicechat.generate(wav, system_prompt=prompt, seed=3)
    session = voicechat.session(system_prompt=prompt, seed=3)
    streamed = collect(voicechat, session, list(events_of(session, wav, CHUNK)))
    assert streamed.frames == offline.frames == FRAMES
    assert streamed.text_tokens == offline.text_tokens
    assert streamed.function_tokens == offline.function_tokens
    assert streamed.transcript == offline.transcript
    assert (streamed.text, streamed.function_text) == (offline.text, offline.function_text)
    assert np.array_equal(streamed.audio_codes, offline.audio_codes)
    assert streamed.audio.shape == offline.audio.shape == (FRAMES * 1764,)
    error = np.abs(streamed.audio[6:] - offline.audio[6:]).max()
    assert error < tolerance("codec", "decoded") * np.abs(offline.audio).max()
    assert len(set(offline.text_tokens)) > 5  # it says something


def session_on_tape(voicechat: VoiceChat, golden: dict[str, mx.array]) -> tuple[Session, int]:
    """A session with NVIDIA's draws, and how many of the run's positions are the prompt's."""
    model = voicechat.model
    prompt_ids = np.array(golden["prompt_ids"])[0].tolist()
    if golden["gen_text_timeline"].shape[1] == golden["encoded"].shape[1]:
        prompt_ids = []  # a run without a prompt stores the ids all the same
    noise = RecordedNoise(golden["noise_u"], golden["noise_z"], model.config.tts_config)
    _, opening = duplex.start(model, model.warm_up(), prompt_ids, noise)
    options = SessionOptions(prompt_ids, 0, False, True, None, 10_000)
    return Session(voicechat.prompts, options, state=live.start(model, opening), noise=noise), len(prompt_ids)


def common_frames(samples: int) -> int:
    """Frames that read no mel row that NVIDIA masks, which is row ``samples // 160``: frame k reads up to row 8 k."""
    return -(-(samples // 160) // 8)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("folder", [*GOLDEN_FOLDERS, SMALL_FOLDER], ids=lambda path: path.name)
def test_streaming_is_nvidias_run(folder: Path, run: str) -> None:
    golden = {name: mx.array(value) for name, value in goldens_of(folder).stages[run].items()}
    voicechat = loaded(folder)
    wav = np.array(golden["wav"])[0]
    session, prompt = session_on_tape(voicechat, golden)
    events = list(events_of(session, wav, CHUNK))
    frames, common = [e for e in events if isinstance(e, AudioFrame)], common_frames(len(wav))
    assert len(frames) == -(-len(wav) // 1280)
    assert len(frames) - 1 <= common <= len(frames)
    for name, ours in (
        ("gen_text_timeline", [f.text_token for f in frames]),
        ("gen_function_timeline", [f.function_token for f in frames]),
    ):
        assert ours[:common] == np.array(golden[name])[0, prompt : prompt + common].tolist()
    first = 0 if prompt else 1  # at time 0 NVIDIA's code array was never written
    theirs = np.array(golden["codes"])[0, prompt : prompt + common]
    assert np.array_equal([f.codes for f in frames[first:common]], theirs[first:])
    if (folder, run) not in SILENT:
        assert_same_sound(frames, golden, prompt, common)
    assert_same_transcript(voicechat, events, golden, common)


def assert_same_sound(frames: list[AudioFrame], golden: dict[str, mx.array], prompt: int, common: int) -> None:
    """Eight samples late, from where the codec no longer hears what came before the first frame or at time 0."""
    stream = np.concatenate([f.samples for f in frames[:common]])
    theirs = np.array(golden["audio"]).reshape(-1)[prompt * 1764 :]
    first = REACH * 1764
    assert len(stream) > first + 1764
    compared = theirs[first : len(stream) - 8]
    error = np.abs(stream[first + 8 :] - compared).max()
    assert error < tolerance("e2e", "audio") * np.abs(compared).max()


def assert_same_transcript(voicechat: VoiceChat, events: list[Event], golden: dict[str, mx.array], common: int) -> None:
    tokens, origins = (np.array(golden[name]).reshape(-1).tolist() for name in ("rnnt_tokens", "rnnt_frames"))
    labels = [token for token, origin in zip(tokens, origins, strict=True) if 0 <= origin < common]
    said = "".join(e.text for e in events if isinstance(e, TranscriptDelta) and e.frame_index < common)
    whole = voicechat.model.rnnt_vocabulary.text(labels)
    assert whole.startswith(said)
    assert whole.removeprefix(said).strip() in ("", "\ufffd")  # an unfinished character waits
    assert len(labels) > 3
