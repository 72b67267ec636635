"""Conversion: what is packed, what is carried over, what is refused, and that nothing is left behind."""

import json
import os
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from voicechat_core import CheckpointError, InputError, load
from voicechat_core.checkpoint import load_networks
from voicechat_core.config import VoiceChatConfig
from voicechat_core.convert import CARRIED, convert
from voicechat_core.hub_cache import NOTICE
from voicechat_core.quantization import Quantization
from voicechat_core.shards import INDEX
from voicechat_core.synthetic import synthesize
from voicechat_core.weights import named_parameters, read_tensors, write_tensors

FOUR = Quantization(4, 32)


@pytest.fixture(scope="module")
def packed(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 4-bit build, not to be changed."""
    path = tmp_path_factory.mktemp("packed") / "4bit"
    convert(tiny_path, path, FOUR)
    return path


def test_the_modules_are_those_of_the_published_layout(tmp_path: Path) -> None:
    """The published pattern has 27 Mamba, 25 MLP and 4 attention layers: 123 modules with embedding and heads."""
    synthesize(tmp_path / "deep", preset="deep")
    done = convert(tmp_path / "deep", tmp_path / "4bit", Quantization(4, 32))
    kinds = ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    counts = {kind: sum(path.endswith(kind) for path in done.modules) for kind in kinds}
    assert list(counts.values()) == [27, 27, 4, 4, 4, 4, 25, 25]
    rest = [path for path in done.modules if ".llm." not in path]
    assert sorted(rest) == ["stt_model.embed_tokens", "stt_model.function_head", "stt_model.lm_head"]
    assert (len(done.modules), done.left_dense) == (123, [])
    tensors = read_tensors(tmp_path / "4bit")
    assert len(tensors) == 1632 + 2 * 123
    assert sum(name.startswith("tts_model.") for name in tensors) == 635


def test_what_is_packed_is_mlx_own_packing_and_the_rest_is_as_it_was(packed: Path, tiny_path: Path) -> None:
    before, after = read_tensors(tiny_path), read_tensors(packed)
    name = "stt_model.llm.layers.2.mixer.out_proj"
    expected = mx.quantize(before[f"{name}.weight"], group_size=32, bits=4)
    for part, value in zip(("weight", "scales", "biases"), expected, strict=True):
        assert mx.array_equal(after[f"{name}.{part}"], value)
    assert (after[f"{name}.weight"].dtype, after[f"{name}.scales"].dtype) == (mx.uint32, mx.float32)
    same = [name for name in before if after[name].dtype != mx.uint32]
    assert len(same) == len(before) - 15
    assert all(after[name].dtype == before[name].dtype and mx.array_equal(after[name], before[name]) for name in same)


def test_rows_are_packed_in_blocks_that_change_nothing(
    tiny_path: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("voicechat_core.convert.AT_ONCE", 7 * 96)
    convert(tiny_path, tmp_path / "blocks", FOUR)
    whole, blocks = read_tensors(packed), read_tensors(tmp_path / "blocks")
    assert all(mx.array_equal(blocks[name], whole[name]) for name in whole)


def test_the_map_names_each_module_under_both_names(packed: Path, tiny_path: Path) -> None:
    config = json.loads((packed / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"]
    found = dict(config["quantization"])
    assert {key: found.pop(key) for key in ("bits", "group_size", "mode")} == {
        "bits": 4, "group_size": 32, "mode": "affine",
    }  # fmt: skip
    assert set(found) == {n.removesuffix(".scales") for n in read_tensors(packed) if n.endswith(".scales")}
    assert all(entry == {"bits": 4, "group_size": 32} for entry in found.values())
    original = json.loads((tiny_path / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        del config[key]
        original.pop(key, None)
    assert config == original


def test_tokenizers_licence_and_notices_come_along(tiny_path: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_path, tmp_path / "source"))
    extra = ["LICENSE", "NOTICE.txt", "README.md", "bias.md", "special_tokens_map.json", "rnnt_tokenizer/vocab.json"]
    for name in extra:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f"{name} of the source")
    (source / "training.pt").write_text("no")
    (tmp_path / "elsewhere").write_text("linked")
    (source / "safety.md").symlink_to(tmp_path / "elsewhere")
    convert(source, tmp_path / "4bit", FOUR)
    found = {str(p.relative_to(tmp_path / "4bit")) for p in (tmp_path / "4bit").rglob("*") if p.is_file()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"} & {p.name for p in tiny_path.iterdir()}
    assert found == {"config.json", INDEX, "model.safetensors", "safety.md", *extra, *tokenizer}
    for name in extra:
        assert (tmp_path / "4bit" / name).read_text() == f"{name} of the source"
    assert not (tmp_path / "4bit" / "safety.md").is_symlink()
    assert (tmp_path / "4bit" / "safety.md").read_text() == "linked"


def test_shards_and_their_index(tiny_path: Path, packed: Path, tmp_path: Path) -> None:
    convert(tiny_path, tmp_path / "sharded", FOUR, shard_bytes=1 << 20)
    shards = sorted(p.name for p in (tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[-1] == f"model-{len(shards):05d}-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "sharded" / INDEX).read_text())
    whole = read_tensors(packed)
    assert index["weight_map"].keys() == whole.keys()
    assert set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in whole.values())
    sharded = read_tensors(tmp_path / "sharded")
    assert all(mx.array_equal(sharded[name], whole[name]) for name in whole)


def test_a_bfloat16_build_keeps_scales_and_decay_rates_in_float32(tiny_path: Path, tmp_path: Path) -> None:
    done = convert(tiny_path, tmp_path / "half", FOUR, dtype="bfloat16")
    kinds = {name: x.dtype for name, x in read_tensors(tmp_path / "half").items()}
    wide = {name for name, kind in kinds.items() if kind == mx.float32}
    assert wide == {n for n in kinds if n.endswith((".scales", ".biases", ".A_log"))}
    assert {kind for name, kind in kinds.items() if name not in wide} == {mx.bfloat16, mx.int64, mx.uint32}
    assert done.bytes_after < done.bytes_before / 2
    assert load(tmp_path / "half").generate(np.zeros(1280, np.float32)).frames == 1


def test_scales_are_float32_whatever_the_source_is_stored_in(tiny_path: Path, tmp_path: Path) -> None:
    convert(tiny_path, tmp_path / "half", dtype="bfloat16")
    convert(tmp_path / "half", tmp_path / "packed", FOUR)
    name = "stt_model.lm_head"
    weight, found = read_tensors(tmp_path / "half")[f"{name}.weight"], read_tensors(tmp_path / "packed")
    expected = mx.quantize(weight.astype(mx.float32), group_size=32, bits=4)
    for part, value in zip(("weight", "scales", "biases"), expected, strict=True):
        assert found[f"{name}.{part}"].dtype == value.dtype
        assert mx.array_equal(found[f"{name}.{part}"], value)
    assert found["stt_model.perception.proj.weight"].dtype == mx.bfloat16


def test_inputs_that_the_group_size_does_not_divide_stay_dense(tiny_path: Path, tmp_path: Path) -> None:
    done = convert(tiny_path, tmp_path / "wide", Quantization(4, 128))
    assert sorted(path.rpartition(".")[2] for path in done.modules) == ["o_proj", "out_proj", "out_proj"]
    assert len(done.left_dense) == 12
    assert load(tmp_path / "wide").model.networks.stt_model.lm_head.quantization is None


def test_a_group_size_that_divides_nothing(tmp_path: Path, tiny_path: Path) -> None:
    for bits, group_size, words in ((4, 48, "group_size is 48"), (7, 64, "bits is 7"), (4, 0, "group_size is 0")):
        with pytest.raises(InputError, match=words):
            convert(tiny_path, tmp_path / "x", Quantization(bits, group_size))
    with pytest.raises(InputError, match="dtype is 'float16'; one of float32, bfloat16 is needed"):
        convert(tiny_path, tmp_path / "x", dtype="float16")
    assert not (tmp_path / "x").exists()


def test_an_existing_target_is_not_touched(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory").mkdir()
    for name in ("file", "directory"):
        with pytest.raises(CheckpointError, match=f"{tmp_path / name}: exists already; nothing is written over it"):
            convert(tiny_path, tmp_path / name, FOUR)
    assert (tmp_path / "file").read_text() == "mine"
    assert list((tmp_path / "directory").iterdir()) == []


def test_a_quantized_source_is_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"quantized already \(15 modules, 4 bits in groups of 32\)"):
        convert(packed, tmp_path / "again", FOUR)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("fault", ["nan", "missing", "shape", "config"])
def test_a_faulty_source_leaves_nothing_behind(tiny_path: Path, tmp_path: Path, fault: str) -> None:
    source = Path(shutil.copytree(tiny_path, tmp_path / "source"))
    name = "tts_model.tts_model.embed_code.weight"
    tensors = {key: mx.array(np.array(value)) for key, value in read_tensors(source).items()}
    if fault == "nan":
        tensors[name] = mx.full(tensors[name].shape, float("nan"))
    elif fault == "missing":
        del tensors[name]
    elif fault == "shape":
        tensors[name] = mx.zeros((1, 2))
    else:
        (source / "config.json").write_text("{}")
    write_tensors(source, tensors.items())
    with pytest.raises(CheckpointError, match="config.json" if fault == "config" else name.replace(".", r"\.")):
        convert(source, tmp_path / "target", FOUR)
    assert not (tmp_path / "target").exists()


def test_numbers_too_far_apart_for_their_scales(tiny_path: Path, tmp_path: Path) -> None:
    """Finite in the source, but their range is not: the scales would be infinite."""
    source = Path(shutil.copytree(tiny_path, tmp_path / "source"))
    name = "stt_model.lm_head"
    tensors = {key: mx.array(np.array(value)) for key, value in read_tensors(source).items()}
    numbers = np.array(tensors[f"{name}.weight"])
    numbers[0, :2] = 3e38, -3e38
    write_tensors(source, (tensors | {f"{name}.weight": mx.array(numbers)}).items())
    with pytest.raises(CheckpointError, match=f"{name}: its numbers are too far apart for float32 scales"):
        convert(source, tmp_path / "target", FOUR)
    assert not (tmp_path / "target").exists()


def test_a_target_inside_its_source(tiny_path: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_path, tmp_path / "source"))
    with pytest.raises(CheckpointError, match="lies in the source"):
        convert(source, source / "4bit", FOUR)
    assert not (source / "4bit").exists()


def test_text_that_cannot_be_written(tiny_path: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_path, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    config["default_system_prompt"] = "\ud800"
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"cannot be written: .*surrogates not allowed"):
        convert(source, tmp_path / "target", FOUR)
    assert list(tmp_path.iterdir()) == [source]


def test_until_all_is_written_there_is_no_target(tiny_path: Path, tmp_path: Path) -> None:
    """So what a killed run leaves hinders nobody: it has another name, and is hidden."""
    seen: set[str] = set()
    convert(tiny_path, tmp_path / "target", FOUR, progress=lambda *_: seen.update(p.name for p in tmp_path.iterdir()))
    (hidden,) = seen
    assert hidden.startswith(".target.partial-")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_is_carried_along_is_what_the_hub_is_asked_for() -> None:
    names = [
        "LICENSE", "LICENCE.txt", "NOTICE", "README.md", "bias.md", "terms.txt", "chat_template.json",
        "rnnt_tokenizer/tokenizer.model", "rnnt_tokenizer/vocab.json",
    ]  # fmt: skip
    assert [name for name in names if not NOTICE.fullmatch(name)] == []
    assert [name for name in names if not any(Path(name).match(pattern) for pattern in CARRIED)] == []
    for name in ("model.bin", "weights.pt", "docs/README.md", "sample.wav"):
        assert not NOTICE.fullmatch(name)


def test_an_interruption_leaves_nothing_behind(tiny_path: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny_path, tmp_path / "target", FOUR, progress=stop)
    assert not (tmp_path / "target").exists()


def test_progress_counts_every_tensor(tiny_path: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert(tiny_path, tmp_path / "target", FOUR, progress=lambda done, total: seen.append((done, total)))
    count = len(read_tensors(tiny_path))
    assert seen == [(done, count) for done in range(1, count + 1)]


def test_memory_holds_a_shard_and_a_matrix_never_the_model(tmp_path: Path) -> None:
    synthesize(tmp_path / "deep", preset="deep", shard_bytes=2 << 20)
    size = sum(x.nbytes for x in read_tensors(tmp_path / "deep").values())
    largest = max(x.nbytes for x in read_tensors(tmp_path / "deep").values())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    convert(tmp_path / "deep", tmp_path / "8bit", Quantization(8, 32), shard_bytes=1 << 20)
    peak = mx.get_peak_memory() - before
    # The shard being filled, the matrix with its float32 copy, and what of both is on its way to the file.
    assert peak < (1 << 20) + 4 * largest
    assert peak < 0.3 * size


def test_a_dense_copy_computes_the_same(tiny_path: Path, tmp_path: Path) -> None:
    convert(tiny_path, tmp_path / "copy", dtype="float32")
    config = VoiceChatConfig.from_file(tiny_path / "config.json")
    ours, theirs = (dict(named_parameters(load_networks(p, config))) for p in (tiny_path, tmp_path / "copy"))
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)
