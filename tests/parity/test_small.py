"""voicechat-small by NVIDIA's classes, by the whole clip and live: the words of two questions and their answers.

A folder of goldens made with another voicechat-small than the one there is fails every test here with one line, which
says what makes it again.
"""

import mlx.core as mx
import numpy as np
import pytest
import soundfile

from tests.conftest import FIXTURES, SMALL_FOLDER, goldens_of
from voicechat_core import VoiceChat, load
from voicechat_core.checkpoint import checkpoint_tensors
from voicechat_core.goldens import Arrays, Goldens
from voicechat_core.nn.linear import Matrix, matrices
from voicechat_core.streaming import generate_live
from voicechat_core.tokenizer import SpecialIds
from voicechat_core.verify import verify
from voicechat_core.weights import read_tensors

WAVS = FIXTURES.parents[1] / "tests" / "data" / "small"
ASKED = {"e2e_plain": "plus_awb", "e2e_prompt": "dice_awb"}
PROMPT = {"e2e_plain": "", "e2e_prompt": "Your name is Sam."}
TAIL_SECONDS = 2.5
MAX_BYTES = 2_600_000


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    return goldens_of(SMALL_FOLDER)


@pytest.fixture(scope="module")
def voicechat(goldens: Goldens) -> VoiceChat:
    return load(goldens.checkpoint(), precision="float32")


def question(run: str) -> np.ndarray:
    samples: np.ndarray = soundfile.read(WAVS / f"{ASKED[run]}.wav", dtype="float32")[0]
    return samples


def test_every_stage_of_the_folder(goldens: Goldens) -> None:
    report = verify(goldens.path)
    assert [check for check in report.checks if not check.passed] == []
    assert {check.stage for check in report.checks} == {
        "codec", "e2e_plain", "e2e_prompt", "perception_question", "tts",
    }  # fmt: skip
    assert len(report.checks) > 60


def test_the_folder_is_small_and_holds_no_checkpoint() -> None:
    assert {path.name for path in SMALL_FOLDER.iterdir()} == {"goldens", "manifest.json"}
    assert sum(path.stat().st_size for path in SMALL_FOLDER.rglob("*") if path.is_file()) < MAX_BYTES


@pytest.mark.parametrize("run", ASKED)
def test_nvidia_heard_the_recordings(goldens: Goldens, voicechat: VoiceChat, run: str) -> None:
    golden = goldens.stages[run]
    heard, asked = golden["wav"][0], question(run)
    assert np.array_equal(heard[: len(asked)], asked)
    assert not heard[len(asked) :].any()
    assert len(heard) > len(asked) + 16000
    assert golden["prompt_ids"][0].tolist() == voicechat.model.prompt_ids(PROMPT["e2e_prompt"])


def test_nvidia_hears_and_says_the_words(goldens: Goldens, voicechat: VoiceChat) -> None:
    golden = goldens.stages["e2e_plain"]
    assert transcript(voicechat, golden) == "what is nine plus zero"
    assert said(voicechat, golden["gen_text_timeline"]) == "Nine plus zero is nine."


def test_nvidia_calls_the_tool(goldens: Goldens, voicechat: VoiceChat) -> None:
    golden = goldens.stages["e2e_prompt"]
    assert transcript(voicechat, golden) == "please roll a dice"
    assert "roll_dice" in said(voicechat, golden["gen_function_timeline"])


def transcript(voicechat: VoiceChat, golden: Arrays) -> str:
    return voicechat.model.rnnt_vocabulary.text(golden["rnnt_tokens"].tolist())


def said(voicechat: VoiceChat, ids: np.ndarray) -> str:
    model = voicechat.model
    return model.tokenizer.visible_text(ids[0].tolist(), SpecialIds.of(model.tokenizer, model.config).hidden)


@pytest.mark.parametrize("run", ASKED)
def test_streaming_is_the_whole_clip_and_nvidias_ids(goldens: Goldens, voicechat: VoiceChat, run: str) -> None:
    """With our own draws, which change the sound and nothing else. ``test_streaming`` has NVIDIA's draws."""
    prompt, asked = PROMPT[run], question(run)
    whole = voicechat.generate(asked, system_prompt=prompt, extra_decoding_seconds=TAIL_SECONDS)
    live = generate_live(voicechat, asked, system_prompt=prompt, extra_decoding_seconds=TAIL_SECONDS).result
    assert (live.transcript, live.text, live.function_text) == (whole.transcript, whole.text, whole.function_text)
    assert (live.text_tokens, live.function_tokens) == (whole.text_tokens, whole.function_tokens)
    assert np.array_equal(live.audio_codes, whole.audio_codes)
    golden = goldens.stages[run]
    assert whole.transcript == transcript(voicechat, golden)
    for channel, ours in (("text", whole.text_tokens), ("function", whole.function_tokens)):
        theirs = golden[f"gen_{channel}_timeline"][0]
        first = len(theirs) - golden["encoded"].shape[1]
        assert list(ours) == theirs[first : first + len(ours)].tolist()
    assert len(whole.text_tokens) > 50


# ---------------------------------------------------------------------------------------- the weights


def test_weights_that_are_not_packed_are_the_stored_ones_widened(goldens: Goldens, voicechat: VoiceChat) -> None:
    """NVIDIA's classes were given the same: a difference between us is none of rounding in the weights."""
    stored = read_tensors(goldens.checkpoint())
    ours = dict(checkpoint_tensors(voicechat.model.networks, voicechat.model.config))
    assert ours.keys() == stored.keys()
    unused = ("_variance_list", "featurizer")
    for name, value in stored.items():
        if not any(word in name for word in unused):
            wide = value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value
            assert np.array_equal(np.array(ours[name]), np.array(wide)), name


def test_packed_matrices_are_scale_times_integer_plus_bias(voicechat: VoiceChat) -> None:
    """The generator's formula, written again: rows are its values but for the last bit, products its matrix's."""
    packed = {path: m for path, m in matrices(voicechat.model.networks).items() if m.quantization is not None}
    assert {"stt_model.embed_tokens", "stt_model.lm_head", "stt_model.llm.layers.0.mixer.in_proj"} <= packed.keys()
    rng = np.random.default_rng(0)
    for path, matrix in packed.items():
        weights, exact = np.array(matrix.rows(mx.arange(matrix.shape[0]))), unpacked(matrix)
        np.testing.assert_allclose(weights, exact, rtol=0, atol=2e-7 * np.abs(exact).max(), err_msg=path)
        x = rng.standard_normal((3, matrix.shape[1])).astype(np.float32)
        theirs = x @ exact.T
        np.testing.assert_allclose(matrix.product(mx.array(x)), theirs, atol=2e-6 * np.abs(theirs).max(), err_msg=path)


def unpacked(matrix: Matrix) -> np.ndarray:
    """``[outputs, inputs]``: integers of ``bits`` bits, lowest first, a scale and a bias for each group of a row."""
    words, scales, biases = (np.array(x) for x in (matrix.weight, matrix.scales, matrix.biases))
    assert matrix.quantization is not None
    bits = matrix.quantization.bits
    assert 32 % bits == 0
    integers = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
    groups = integers.reshape(*scales.shape, -1).astype(np.float64)
    return (scales[..., None] * groups + biases[..., None]).reshape(matrix.shape).astype(np.float32)
