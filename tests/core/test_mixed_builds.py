"""Builds as other software makes them: every matrix of the model packed, each in its own way."""

import json
import shutil
from itertools import cycle
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from voicechat_core import load, synthetic
from voicechat_core.checkpoint import load_model
from voicechat_core.config import VoiceChatConfig
from voicechat_core.model import Networks
from voicechat_core.nn.linear import matrices
from voicechat_core.noise import KeyedNoise
from voicechat_core.offline import Timeline, run_timeline
from voicechat_core.quantization import BITS, Quantization
from voicechat_core.weights import read_tensors, write_tensors

PARTS = ("weight", "scales", "biases")


def even() -> dict[str, object]:
    """The tiny preset with inputs that 32 divides everywhere."""
    data = synthetic.PRESETS["tiny"]()
    data["audio_config"]["encoder"] |= {"d_model": 96, "subsampling_conv_channels": 32}
    for part in ("decoder", "joint"):
        data["audio_config"][part]["pred_hidden"] = 64
    data["audio_config"]["joint"] |= {"joint_hidden": 64, "encoder_hidden": 96}
    return data


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Quantization]]:
    """A packed build, the dense one with its numbers, and how each module is packed."""
    root = tmp_path_factory.mktemp("mixed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synthetic.PRESETS, "even", even)
        synthetic.synthesize(root / "source", preset="even")
    config = VoiceChatConfig.from_file(root / "source" / "config.json")
    settings = {}
    ways = cycle([(bits, size) for bits in BITS for size in (32, 64, 128)])
    for path, matrix in matrices(Networks(config)).items():
        settings[path] = next(Quantization(b, s) for b, s in ways if matrix.shape[1] % s == 0)
    packed, dense = {}, dict(read_tensors(root / "source"))
    for path, q in settings.items():
        parts = mx.quantize(dense[f"{path}.weight"], group_size=q.group_size, bits=q.bits)
        packed |= {f"{path}.{part}": value for part, value in zip(PARTS, parts, strict=True)}
        dense[f"{path}.weight"] = mx.dequantize(*parts, group_size=q.group_size, bits=q.bits)
    for name, tensors in (("packed", dense | packed), ("dense", dense)):
        shutil.copytree(root / "source", root / name)
        mx.eval(tensors)
        write_tensors(root / name, tensors.items())
    data = json.loads((root / "packed" / "config.json").read_text())
    overrides = {path: {"bits": q.bits, "group_size": q.group_size} for path, q in settings.items()}
    data["quantization"] = {"bits": 3, "group_size": 64, **overrides}
    (root / "packed" / "config.json").write_text(json.dumps(data))
    return root / "packed", root / "dense", settings


def run(path: Path) -> Timeline:
    model = load_model(path, "float32")
    samples = np.random.default_rng(0).standard_normal(10 * 1280).astype(np.float32) * 0.1
    noise = KeyedNoise(0, model.config.tts_config)
    return run_timeline(model, samples, model.prompt_ids("Be concise."), noise, keep_logits=True)


def test_every_matrix_is_packed_as_the_map_says(builds: tuple[Path, Path, dict[str, Quantization]]) -> None:
    packed, _, settings = builds
    found = matrices(load_model(packed, "float32").networks)
    assert {path: matrix.quantization for path, matrix in found.items()} == settings
    assert {q.bits for q in settings.values()} == set(BITS)
    assert len(settings) == 115
    for part in ("stt_model.perception.", "stt_model.rnnt_", "tts_model.tts_model.mog_head.proj_mus"):
        assert any(path.startswith(part) for path in settings)


def test_it_says_and_speaks_what_its_numbers_do_in_a_dense_model(
    builds: tuple[Path, Path, dict[str, Quantization]],
) -> None:
    ours, theirs = (run(path) for path in builds[:2])
    for name in ("text", "function", "codes"):
        assert mx.array_equal(ours.over_all(name), theirs.over_all(name)), name
    for name in ("encoded",):
        assert np.allclose(getattr(ours, name), getattr(theirs, name), atol=1e-5)
    for name in ("inputs", "hidden", "text_logits"):
        assert np.allclose(ours.over_all(name), theirs.over_all(name), atol=1e-4), name


def test_it_answers_in_every_precision(builds: tuple[Path, Path, dict[str, Quantization]]) -> None:
    for precision in ("auto", "float32", "bfloat16"):
        answer = load(builds[0], precision=precision).generate(np.zeros(3 * 1280, np.float32))  # type: ignore[arg-type]
        assert (answer.frames, answer.audio.shape) == (3, (3 * 1764,))
        assert np.isfinite(answer.audio).all()
