"""Inspection: every number of the published census, every fault in one go, and not a value read."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from tests.core.checkpoints import (
    HEADS,
    PUBLISHED,
    Tensors,
    config_of,
    drop,
    edit_config,
    quantized,
    rewrite,
    write_hollow,
)
from voicechat_core import CheckpointError, checkpoint, load
from voicechat_core.checkpoint import load_networks
from voicechat_core.config import VoiceChatConfig
from voicechat_core.inspection import Inspection, Part, inspect
from voicechat_core.inspection_report import inspection_json, inspection_text
from voicechat_core.synthetic import synthesize
from voicechat_core.weights import named_parameters, read_tensors

MIXER = "stt_model.llm.layers.3.mixer"  # the tiny preset's attention: 128 outputs, 96 inputs
Q_PROJ = f"{MIXER}.q_proj"
CODEBOOK = "tts_model.audio_codec.prvq.mus_list.0"
CLEAN = "nothing is missing, left over or inconsistent"


def row(inspection: Inspection, name: str) -> Part:
    assert inspection.weights is not None
    (found,) = [part for part in inspection.weights.parts if part.name == name]
    return found


def lines(inspection: Inspection) -> list[str]:
    return inspection_text(inspection).splitlines()


# ------------------------------------------------------------------------------------------ what is there


def test_the_parts_of_a_dense_checkpoint(tiny_path: Path) -> None:
    weights = inspect(tiny_path).weights
    assert weights is not None
    f32, f32_i64 = ("f32",), ("f32", "i64")
    assert weights.parts == [
        Part("perception", 68, 374_816, 1_499_264, f32, 0),
        Part("rnnt", 15, 52_311, 209_244, f32, 0),
        Part("embed_tokens", 1, 45_504, 182_016, f32, 0),
        Part("llm", 30, 288_496, 1_153_984, f32, 0),
        Part("lm_head", 1, 45_504, 182_016, f32, 0),
        Part("function_head", 1, 45_504, 182_016, f32, 0),
        Part("ear_tts", 145, 533_016, 2_135_868, f32_i64, 0),
        Part("codec", 118, 226_175, 904_700, f32, 0),
        Part("voice", 3, 2_402, 9_744, f32_i64, 0),
    ]
    assert weights.total == Part("total", 382, 1_613_728, 6_458_852, f32_i64, 0)
    data = (tiny_path / "model.safetensors").read_bytes()
    assert weights.total.bytes == len(data) - 8 - int.from_bytes(data[:8], "little")


# Tensors, parameters and bytes are the published ones: 11,095,371,286 numbers, 22.19 and 9.17 GB.
@pytest.mark.parametrize(
    ("bits", "tensors", "size", "auto", "float32"),
    [
        (0, 1632, 22_192_315_658, 22_434_517_904, 44_381_351_824),
        (4, 1878, 9_166_626_058, 9_408_828_304, 12_409_204_624),
    ],
)
def test_the_published_size(tmp_path: Path, bits: int, tensors: int, size: int, auto: int, float32: int) -> None:
    assert write_hollow(tmp_path, PUBLISHED, bits) == size
    inspection = inspect(tmp_path)
    assert inspection.weights is not None
    assert len(inspection.problems) == 1  # only this one
    assert "tokenizer.json" in inspection.problems[0]
    total = inspection.weights.total
    assert (total.tensors, total.parameters, total.bytes) == (tensors, 11_095_371_286, size)
    assert total.quantized == (123 if bits else 0)
    assert total.stored == (("bf16", "i64", "4-bit") if bits else ("bf16", "i64"))
    parameters = {part.name: part.parameters for part in inspection.weights.parts}
    assert (parameters["llm"], parameters["embed_tokens"]) == (7_713_822_208, 587_202_560)
    assert inspection.weights.auto == "bfloat16"
    assert inspection.weights.memory == {"auto": auto, "float32": float32}
    the_map = "  4 bits in groups of 64: 123 modules (llm 120, embed_tokens 1, lm_head 1, function_head 1)"
    expected = ["quantization: scales and biases are f32", the_map] if bits else ["quantization: none"]
    assert [line for line in lines(inspection) if line.startswith("quantization") or "modules" in line] == expected


def test_a_packed_matrix_counts_its_numbers_not_its_words(mixed: Path, tiny_path: Path) -> None:
    inspection, dense = inspect(mixed), inspect(tiny_path)
    assert inspection.problems == []
    assert inspection.warnings == []
    for name in ("llm", "embed_tokens", "ear_tts"):
        assert row(inspection, name).parameters == row(dense, name).parameters
    assert row(inspection, "lm_head") == Part("lm_head", 3, 45_504, 45_504 + 2 * 4 * 474 * 3, ("8-bit",), 1)
    assert row(inspection, "llm").stored == ("bf16", "4-bit")
    assert row(inspection, "llm").tensors == 30 + 2 * 12


@pytest.mark.parametrize("which", ["broken", "mixed"])
@pytest.mark.parametrize("precision", ["auto", "float32"])
def test_memory_is_what_loading_takes(which: str, precision: Any, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    # Codebooks that are the speech decoder's would be kept once, and only values can tell.
    rewrite(path, lambda tensors: tensors.update({CODEBOOK: mx.zeros_like(tensors[CODEBOOK])}))
    networks = load_networks(path, VoiceChatConfig.from_file(path / "config.json"), precision)
    weights = inspect(path).weights
    assert weights is not None
    assert weights.memory[precision] == sum(value.nbytes for _, value in named_parameters(networks))


def test_a_single_module_and_scales_of_two_kinds(broken: Path) -> None:
    parts = quantized(Q_PROJ, read_tensors(broken)[f"{Q_PROJ}.weight"], 6)
    parts[f"{Q_PROJ}.scales"] = parts[f"{Q_PROJ}.scales"].astype(mx.float16)
    rewrite(broken, lambda tensors: tensors.update(parts))
    edit_config(broken, quantization={Q_PROJ: {"group_size": 32, "bits": 6}})
    text = lines(inspect(broken))
    assert text[text.index("quantization: scales and biases are f16 + f32") + 1] == (
        "  6 bits in groups of 32: 1 module (llm 1)"
    )


def test_the_bias_of_a_packed_matrix_is_a_weight(broken: Path, tiny_path: Path) -> None:
    """Its own, not the packing's."""
    path = "tts_model.tts_model.gated_fusion_audio_text.text_proj"
    parts = quantized(path, read_tensors(broken)[f"{path}.weight"], 4)
    bias = read_tensors(broken)[f"{path}.bias"].astype(mx.float16)
    rewrite(broken, lambda tensors: tensors.update(parts | {f"{path}.bias": bias}))
    edit_config(broken, quantization={path: {"group_size": 32, "bits": 4}})
    inspection, dense = inspect(broken), row(inspect(tiny_path), "ear_tts")
    assert inspection.problems == []
    found = row(inspection, "ear_tts")
    assert found.stored == ("f32", "i64", "f16", "4-bit")
    assert (found.tensors, found.parameters, found.quantized) == (dense.tensors + 2, dense.parameters, 1)


def test_what_the_model_is(tiny_path: Path, broken: Path) -> None:
    edit_config(broken, source_revision="c5d3b70")
    text = lines(inspect(broken))
    assert "nemotron_voicechat, speaker Aria, 5 language layers" in text
    assert "vocabularies: 474 text tokens, 86 transcript pieces" in text
    assert "source revision c5d3b70" in text
    assert "precision auto is float32 here" in text
    assert not any(line.startswith("source revision") for line in lines(inspect(tiny_path)))
    edit_config(broken, source_revision=["c5d3b70"])
    assert inspection_json(inspect(broken))["model"]["source_revision"] is None


# ------------------------------------------------------------------------------------------ no value is read


def test_no_value_is_looked_at(tiny_path: Path, broken: Path) -> None:
    file = broken / "model.safetensors"
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[:start] + b"\xff" * (len(data) - start))  # every float is NaN, every integer -1
    with pytest.raises(CheckpointError):
        load(broken)
    assert replace(inspect(broken), directory=tiny_path) == inspect(tiny_path)
    assert lines(inspect(broken))[-2:] == [
        CLEAN,
        "Values have not been looked at: loading does that, and refuses what is not finite.",
    ]


def test_nothing_is_computed(tmp_path: Path) -> None:
    write_hollow(tmp_path, PUBLISHED, 0)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    inspect(tmp_path)
    assert mx.get_peak_memory() - before < 1 << 20  # of 22 GB


# ------------------------------------------------------------------------------------------ what is wrong


def test_a_sound_checkpoint_has_no_problem(tiny_path: Path) -> None:
    inspection = inspect(tiny_path)
    assert (inspection.passed, inspection.problems, inspection.warnings) == (True, [], [])
    assert CLEAN in lines(inspection)


def put(**values: mx.array) -> Callable[[Tensors], None]:
    """``part=value`` of the attention's query projection."""
    return lambda tensors: tensors.update({f"{Q_PROJ}.{part}": value for part, value in values.items()})


U32 = mx.uint32
DENSE_FAULTS = {
    "missing": (drop(f"{Q_PROJ}.weight"), f"1 missing tensors: {Q_PROJ}.weight"),
    "left over": (put(bias=mx.zeros((128,))), f"1 tensors that this model does not have: {Q_PROJ}.bias"),
    "shape": (put(weight=mx.zeros((7, 96))), f"{Q_PROJ}.weight has shape [7, 96]; the config makes it [128, 96]"),
    "kind": (
        put(weight=mx.zeros((128, 96), mx.int64)),
        f"{Q_PROJ}.weight is mlx.core.int64; floating numbers are needed",
    ),
    "half quantized": (put(scales=mx.zeros((128, 3))), f"{Q_PROJ} has scales but no biases"),
    "twice": (
        put(scales=mx.zeros((128, 3)), biases=mx.zeros((128, 3))),
        f"{Q_PROJ} is there both dense (float32 weight) and quantized (scales): one of the two is needed",
    ),
    "biases": (put(biases=mx.zeros((128, 3))), f"{Q_PROJ} has biases but no scales"),
    "words": (put(weight=mx.zeros((128, 12), U32)), f"{Q_PROJ} has a packed weight (uint32) but no scales"),
}
PACKED_FAULTS = {
    "no weight": (drop(f"{Q_PROJ}.weight"), f"{Q_PROJ} has scales but no weight"),
    "no biases": (drop(f"{Q_PROJ}.biases"), f"{Q_PROJ} has scales but no biases"),
    "no scales": (drop(f"{Q_PROJ}.scales"), f"{Q_PROJ} has a packed weight (uint32) but no scales"),
    "scales": (
        put(scales=mx.zeros((128, 2))), f"{Q_PROJ}.scales has shape [128, 2] but {Q_PROJ}.biases [128, 3]"
    ),
    "misfit": (
        put(weight=mx.zeros((128, 11), U32)),
        f"{Q_PROJ}: weight [128, 11] and scales [128, 3]; 4 bits in groups of 32 make them [128, 12] and [128, 3]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "problem"), DENSE_FAULTS.values(), ids=DENSE_FAULTS)
def test_a_fault_of_a_dense_checkpoint(broken: Path, change: Callable[[Tensors], None], problem: str) -> None:
    rewrite(broken, change)
    assert_only(inspect(broken), problem)


@pytest.mark.parametrize(("change", "problem"), PACKED_FAULTS.values(), ids=PACKED_FAULTS)
def test_a_fault_of_a_packed_checkpoint(mixed: Path, change: Callable[[Tensors], None], problem: str) -> None:
    rewrite(mixed, change)
    assert_only(inspect(mixed), problem)
    assert inspection_json(inspect(mixed))["weights"]["left_over"] == []  # what is there is its module's


def assert_only(inspection: Inspection, problem: str) -> None:
    assert inspection.problems == [problem]
    assert not inspection.passed
    text = lines(inspection)
    assert text[text.index("problems:") + 1] == f"  {problem}"
    assert CLEAN not in text
    with pytest.raises(CheckpointError) as caught:
        load(inspection.directory)
    assert str(caught.value) == f"{inspection.directory}: {problem}"


def test_the_map_forbids_what_the_tensors_hold(mixed: Path) -> None:
    edit_config(mixed, quantization={"group_size": 32, "bits": 4, Q_PROJ: False, **{h: {"bits": 8} for h in HEADS}})
    assert_only(inspect(mixed), f"{Q_PROJ} has scales, but config.json says that it is not quantized (false)")
    llm = row(inspect(mixed), "llm")
    assert (llm.tensors, llm.quantized) == (54, 11)
    assert llm.parameters == 288_496  # what its words stand for is known all the same
    assert set(llm.stored) == {"bf16", "f32", "u32", "4-bit"}


def test_where_map_and_shapes_disagree_there_is_a_warning(mixed: Path) -> None:
    edit_config(mixed, quantization={"group_size": 32, "bits": 4, "stt_model.llm.layers.9": True})
    inspection = inspect(mixed)
    assert inspection.passed
    assert inspection.warnings == [
        *(
            f"{head}: config.json says 4 bits in groups of 32, its shapes 8 bits in groups of 32, which is taken"
            for head in sorted(HEADS)
        ),
        "stt_model.llm.layers.9: config.json says that it is quantized, but there is no such module",
    ]
    text = lines(inspection)
    start = text.index("warnings:")
    assert text[start + 1 : start + 5] == [f"  {warning}" for warning in inspection.warnings]
    assert text[start + 5] == "nothing forbids loading"


def test_left_over_tensors_have_a_row_of_their_own(broken: Path, tiny_path: Path) -> None:
    stray = {"stt_model.llm.asr.scales": mx.zeros((2, 3)), "extra.weight": mx.zeros((5,), mx.float16)}
    rewrite(broken, lambda tensors: tensors.update(stray))
    inspection = inspect(broken)
    assert inspection.weights is not None
    assert inspection.weights.parts[:-1] == inspect(tiny_path).weights.parts  # type: ignore[union-attr]
    assert row(inspection, "unknown") == Part("unknown", 2, 5, 24 + 10, ("f32", "f16"), 0)
    assert inspection.weights.left_over == ["extra.weight", "stt_model.llm.asr.scales"]
    assert inspection.weights.total.tensors == 384


def test_everything_wrong_is_said_at_once(mixed: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        del tensors[f"{Q_PROJ}.biases"]
        del tensors["stt_model.lm_head.weight"]
        del tensors["stt_model.llm.norm_f.weight"]
        tensors[f"{MIXER}.k_proj.scales"] = mx.zeros((1, 3))
        tensors["tts_model.tts_model.bos_emb"] = mx.zeros((3,))
        tensors["tts_model.tts_model.null_emb"] = mx.zeros((64,), mx.int64)
        tensors["extra"] = mx.zeros((1,))

    rewrite(mixed, spoil)
    (mixed / "tokenizer.json").unlink()
    edit_config(mixed, rnnt_vocabulary=None)
    (mixed / "rnnt_tokenizer").mkdir(exist_ok=True)
    (mixed / "rnnt_tokenizer" / "vocab.json").write_text('["a", "b"]')
    inspection = inspect(mixed)
    assert inspection.problems[0].startswith(f"{mixed / 'tokenizer.json'}: cannot be read as a tokenizer")
    vocabulary = mixed / "rnnt_tokenizer" / "vocab.json"
    assert inspection.problems[1:] == [
        f"the length of {vocabulary} is 2 but rnnt_blank_id is 86",
        f"{MIXER}.k_proj.scales has shape [1, 3] but {MIXER}.k_proj.biases [64, 3]",
        f"{Q_PROJ} has scales but no biases",
        "stt_model.lm_head has scales but no weight",
        "1 missing tensors: stt_model.llm.norm_f.weight",
        "tts_model.tts_model.bos_emb has shape [3]; the config makes it [64]",
        "tts_model.tts_model.null_emb is mlx.core.int64; floating numbers are needed",
        "1 tensors that this model does not have: extra",
    ]
    assert "vocabularies: 474 text tokens, a transcript vocabulary that cannot be read" in lines(inspection)
    assert inspection_json(inspection)["model"]["transcript"] is None


@pytest.mark.parametrize("keep", [None, 4, 1000, -1])
def test_a_missing_or_cut_shard(broken: Path, keep: int | None) -> None:
    file = broken / "model.safetensors"
    data = file.read_bytes()
    file.unlink()
    if keep is not None:
        file.write_bytes(data[:keep])
    (broken / "tokenizer.json").unlink()
    inspection = inspect(broken)
    tokenizer, shard, missing = inspection.problems
    assert "tokenizer.json" in tokenizer
    reason = "this shard is missing" if keep is None else "cannot be read as safetensors: "
    assert shard.startswith(f"{file}: {reason}")
    assert inspection.weights is not None
    assert (inspection.weights.total.tensors, len(inspection.weights.missing)) == (0, 348)
    assert missing.startswith("348 missing tensors: ")
    assert "nemotron_voicechat, speaker Aria, 5 language layers" in lines(inspection)


def test_every_faulty_file_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "sharded"
    synthesize(path, seed=0, shard_bytes=1 << 20)
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 5
    held = [set(cast("Tensors", mx.load(str(shard)))) for shard in shards]
    shards[1].unlink()
    shards[3].write_bytes(b"x")
    (path / "model.safetensors.index.json").write_text("{")
    inspection = inspect(path)
    assert inspection.problems[0].startswith(f"{path / 'model.safetensors.index.json'}: not an index")
    assert inspection.problems[1] == f"{shards[1]}: this shard is missing"
    assert inspection.problems[2].startswith(f"{shards[3]}: cannot be read as safetensors")
    assert inspection.weights is not None
    assert inspection.weights.total.tensors == 382 - len(held[1]) - len(held[3])
    lost = {name for name in held[1] | held[3] if not checkpoint.UNUSED.fullmatch(name)}
    assert set(inspection.weights.missing) == lost


def test_an_index_that_lists_too_much(broken: Path) -> None:
    index = broken / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"] |= {"lost": "model.safetensors", "gone": "model-2.safetensors"}
    index.write_text(json.dumps(data))
    assert inspect(broken).problems == [
        f"{broken / 'model-2.safetensors'}: this shard is missing",
        f"{index}: 1 tensors listed that no shard holds: lost",
    ]


def test_a_tokenizer_that_does_not_fit(broken: Path) -> None:
    config = config_of(broken)
    config["tts_config"]["character_encoder"]["char_vocab_size"] = 200
    edit_config(broken, **config)
    problems = inspect(broken).problems
    assert problems[0] == (
        "character_encoder.char_vocab_size is 200 (padding included) but the tokenizer has 256 one-character tokens"
    )
    assert len(problems) == 2  # the embedding has another size then
    assert problems[1].endswith("embed_tokens.weight has shape [257, 64]; the config makes it [200, 64]")


def test_without_a_transcript_branch(broken: Path) -> None:
    edit_config(broken, rnnt_vocabulary=[])
    rewrite(broken, drop(*[name for name in read_tensors(broken) if "rnnt" in name]))
    inspection = inspect(broken)
    assert inspection.problems == []
    assert inspection.warnings == ["no RNNT vocabulary: there will be no user transcript"]
    assert row(inspection, "rnnt") == Part("rnnt", 0, 0, 0, (), 0)
    assert inspection.weights is not None
    assert inspection.weights.missing == []
    assert inspection.weights.memory["float32"] == 6_321_592 - 209_244
    assert "vocabularies: 474 text tokens, no transcript branch" in lines(inspection)
    assert inspection_json(inspection)["model"]["transcript"] is False


def test_a_bad_vocabulary_does_not_excuse_missing_tensors(broken: Path) -> None:
    edit_config(broken, rnnt_vocabulary=None)
    (broken / "rnnt_tokenizer").mkdir(exist_ok=True)
    (broken / "rnnt_tokenizer" / "vocab.json").write_text("{}x")
    rewrite(broken, drop("stt_model.rnnt_joint.enc.bias"))
    vocabulary, missing = inspect(broken).problems
    assert vocabulary.startswith(f"{broken / 'rnnt_tokenizer' / 'vocab.json'}: cannot be read as JSON")
    assert missing == "1 missing tensors: stt_model.rnnt_joint.enc.bias"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model_type": "llama"}'])
def test_a_config_that_cannot_be_read_is_the_only_problem(broken: Path, content: str | None) -> None:
    (broken / "tokenizer.json").unlink()
    file = broken / "config.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    inspection = inspect(broken)
    (problem,) = inspection.problems
    assert problem.startswith(f"{file}: ")
    assert (inspection.model, inspection.weights, inspection.passed) == (None, None, False)
    assert lines(inspection)[:3] == [str(broken), "problems:", f"  {problem}"]


def test_sizes_that_make_no_model_are_a_problem(broken: Path) -> None:
    sizes = {"mamba_num_heads": 1 << 24, "mamba_head_dim": 1 << 24, "n_groups": 1}
    edit_config(broken, text_config=config_of(broken)["text_config"] | sizes)
    (broken / "tokenizer.json").unlink()
    inspection = inspect(broken)
    tokenizer, sizes_problem = inspection.problems
    assert "tokenizer.json" in tokenizer
    assert sizes_problem.startswith("config.json: its sizes make no model that could be built: ")
    assert inspection.weights is None
    assert inspection_json(inspection)["weights"] is None
    text = lines(inspection)
    assert text[1] == "nemotron_voicechat, speaker Aria, 5 language layers"
    assert f"  {sizes_problem}" in text


def test_bits_that_do_not_exist_are_the_configs_fault(broken: Path) -> None:
    edit_config(broken, quantization={"group_size": 64, "bits": 7})
    (problem,) = inspect(broken).problems
    assert problem.startswith(f"{broken / 'config.json'}: quantization.bits is 7")


def test_no_directory(tmp_path: Path, tiny_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent: no such directory"):
        inspect(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config\.json: not a directory"):
        inspect(tiny_path / "config.json")
