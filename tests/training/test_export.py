"""Trained parts become a checkpoint in the published layout: every tensor once, in its format, nothing else."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from training.export import dense, export
from training.initial import initialise
from training.small import small_config
from voicechat_core import load
from voicechat_core.errors import CheckpointError
from voicechat_core.hub import locate
from voicechat_core.inspection import inspect
from voicechat_core.model import Networks
from voicechat_core.nn.layout import checkpoint_axes, to_checkpoint
from voicechat_core.weights import named_parameters, read_tensors

PARTS = ("tts_model.audio_codec.", "stt_model.", "tts_model.")


@pytest.fixture(scope="module")
def networks() -> Networks:
    result = Networks(small_config())
    initialise(result, seed=1)
    # Of half-precision numbers, as the codec's training leaves its codebooks.
    codebooks = [mx.random.normal((128, 64), key=mx.random.key(i)).astype(mx.float16) for i in range(31)]
    result.tts_model.audio_codec.prvq.mus_list = [book.astype(mx.float32) for book in codebooks]
    result.tts_model.tts_model.rvq_embs = mx.stack(codebooks).astype(mx.float32)
    return result


@pytest.fixture(scope="module")
def parts(networks: Networks, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("parts")
    axes, files = dict(checkpoint_axes(networks)), []
    left = dict(named_parameters(networks))
    for number, prefix in enumerate(PARTS):
        names = [n for n in left if n.startswith(prefix) and ("embed_subword" not in n or n.endswith("weight"))]
        some = {name: mx.contiguous(to_checkpoint(left.pop(name), axes.get(name))) for name in names}
        files.append(folder / f"{number}.safetensors")
        mx.save_safetensors(str(files[-1]), some)
    return files


def test_all_arrive_in_their_formats(parts: list[Path], networks: Networks, tmp_path: Path) -> None:
    dense(parts, tmp_path / "dense")
    stored, mine = read_tensors(tmp_path / "dense"), dict(named_parameters(networks))
    assert inspect(tmp_path / "dense").passed
    assert stored["stt_model.lm_head.weight"].dtype == mx.bfloat16
    assert stored["stt_model.llm.layers.0.mixer.A_log"].dtype == mx.float32
    featurizer = "stt_model.perception.preprocessor.featurizer"
    assert all(stored[f"{featurizer}.{name}"].dtype == mx.float32 for name in ("fb", "window"))
    books = stored["tts_model.tts_model.rvq_embs"]
    assert books.dtype == mx.float16
    assert mx.array_equal(books[5], stored["tts_model.audio_codec.prvq.mus_list.5"])
    assert mx.array_equal(books.astype(mx.float32), mine["tts_model.tts_model.rvq_embs"])
    name = "stt_model.perception.proj.weight"
    assert mx.array_equal(stored[name], mine[name].astype(mx.bfloat16))


def test_packed_in_a_file_for_each_part(parts: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "small"
    size = export(parts, target)
    weights = sorted(file.name for file in target.glob("*.safetensors"))
    assert weights == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for file, prefix in zip(weights, PARTS, strict=True):
        names = list(mx.load(str(target / file)))
        assert names
        assert all(name.startswith(prefix) for name in names)
    assert size == sum(value.nbytes for value in read_tensors(target).values()) < 14_000_000
    assert "stt_model.lm_head.scales" in read_tensors(target)
    assert "tts_model.tts_model.mog_head.proj_mus.scales" not in read_tensors(target)
    assert inspect(target).passed
    for name in ("LICENSE", "NOTICE"):
        assert (target / name).read_bytes() == (locate("voicechat-small") / name).read_bytes()
    assert load(target).generate(np.zeros(2560, np.float32)).frames == 2


def test_another_speech_decoder_leaves_the_other_files_alone(parts: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    tensors = mx.load(str(parts[2]))
    name = "tts_model.tts_model.mog_head.proj_mus.weight"
    mx.save_safetensors(str(other), tensors | {name: 0.5 * tensors[name]})
    export(parts, tmp_path / "a")
    export([*parts[:2], other], tmp_path / "b")
    same = {f.name: f.read_bytes() == (tmp_path / "b" / f.name).read_bytes() for f in (tmp_path / "a").glob("*.safe*")}
    assert [same[name] for name in sorted(same)[:3]] == [True, True, False]


def test_what_is_missing_or_given_twice_is_refused(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing tensors"):
        export(parts[:2], tmp_path / "less")
    with pytest.raises(CheckpointError, match="is in another part too"):
        export([*parts, parts[0]], tmp_path / "more")
    strange = tmp_path / "strange.safetensors"
    mx.save_safetensors(str(strange), {"stt_model.tail": mx.zeros(3)})
    with pytest.raises(CheckpointError, match=r"stt_model\.tail: not a tensor of this model"):
        export([*parts, strange], tmp_path / "strange")
    assert not any((tmp_path / name).exists() for name in ("less", "more", "strange"))
