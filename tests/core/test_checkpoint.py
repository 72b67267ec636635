"""Loading: what fits loads to the bit, what does not is named, once, with both values."""

import io
import json
import os
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.core.checkpoints import config_of, drop, edit_config, rewrite
from voicechat_core import CheckpointError, load, weights
from voicechat_core.checkpoint import checkpoint_tensors, load_networks
from voicechat_core.config import VoiceChatConfig
from voicechat_core.convert import convert
from voicechat_core.quantization import Quantization
from voicechat_core.synthetic import synthesize
from voicechat_core.weights import is_finite, named_parameters, read_tensors

Q_PROJ = "stt_model.llm.layers.3.mixer.q_proj.weight"


def message(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_every_parameter_is_loaded_to_the_bit(golden_checkpoint: Path) -> None:
    config = VoiceChatConfig.from_file(golden_checkpoint / "config.json")
    stored = read_tensors(golden_checkpoint)
    written = dict(checkpoint_tensors(load_networks(golden_checkpoint, config), config))
    assert written.keys() == stored.keys()
    unused = ("_variance_list", "featurizer")
    for name, value in stored.items():
        if not any(word in name for word in unused):
            assert np.array_equal(np.array(written[name]), np.array(value)), name


@pytest.fixture(params=["plain", "grouped"])
def golden_checkpoint(request: pytest.FixtureRequest) -> Path:
    """Checkpoint directories that NVIDIA's own modules wrote."""
    return Path(__file__).parents[2] / "golden" / "fixtures" / str(request.param) / "checkpoint"


def test_a_deep_checkpoint_has_the_published_census(tmp_path: Path) -> None:
    synthesize(tmp_path / "deep", preset="deep")
    names = read_tensors(tmp_path / "deep").keys()
    counts = {
        "stt_model.perception.encoder.": 636,
        "stt_model.perception.proj.": 2,
        "stt_model.perception.preprocessor.": 2,
        "stt_model.rnnt_decoder.": 9,
        "stt_model.rnnt_joint.": 6,
        "stt_model.llm.": 339,
        "stt_model.": 997,
        "tts_model.tts_model.": 418,
        "tts_model.audio_codec.": 214,
        "tts_model.": 635,
        "": 1632,
    }
    assert {prefix: sum(n.startswith(prefix) for n in names) for prefix in counts} == counts


def test_sharded_equals_single(tiny_path: Path, tmp_path: Path) -> None:
    synthesize(tmp_path / "sharded", seed=0, shard_bytes=1 << 20)
    shards = sorted(p.name for p in (tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 5
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    config = VoiceChatConfig.from_file(tiny_path / "config.json")
    single, sharded = (load_networks(path, config) for path in (tiny_path, tmp_path / "sharded"))
    for (name, a), (_, b) in zip(named_parameters(single), named_parameters(sharded), strict=True):
        assert mx.array_equal(a, b), name


def test_without_an_index_the_files_are_found(broken: Path) -> None:
    (broken / "model.safetensors.index.json").unlink()
    load(broken)


def test_memory_order_loads_too(broken: Path, tiny_path: Path) -> None:
    config = VoiceChatConfig.from_file(tiny_path / "config.json")
    networks = load_networks(tiny_path, config)
    conv = "stt_model.llm.layers.0.mixer.conv1d.weight"
    in_memory = dict(named_parameters(networks))[conv]
    assert in_memory.shape != read_tensors(tiny_path)[conv].shape
    rewrite(broken, lambda tensors: tensors.update({conv: in_memory}))
    assert mx.array_equal(dict(named_parameters(load_networks(broken, config)))[conv], in_memory)


def test_bf16_weights_load_as_float32(broken: Path, tiny_path: Path) -> None:
    def to_bf16(tensors: dict[str, mx.array]) -> None:
        for name, value in tensors.items():
            if value.dtype == mx.float32:
                tensors[name] = value.astype(mx.bfloat16)

    rewrite(broken, to_bf16)
    config = VoiceChatConfig.from_file(broken / "config.json")
    parameters = dict(named_parameters(load_networks(broken, config)))
    exact = dict(named_parameters(load_networks(tiny_path, config)))
    assert {str(p.dtype) for p in parameters.values()} == {"mlx.core.float32", "mlx.core.int32"}
    assert mx.array_equal(parameters[Q_PROJ], exact[Q_PROJ].astype(mx.bfloat16).astype(mx.float32))


def test_missing_shard(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert f"{broken / 'model.safetensors'}: this shard is missing" in message(broken)


@pytest.mark.parametrize("outside", ["../secrets.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_index_naming_a_file_outside(broken: Path, outside: str) -> None:
    index = broken / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {Q_PROJ: outside}}))
    text = message(broken)
    assert str(index) in text
    assert repr(outside) in text
    assert "outside the directory" in text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}'])
def test_broken_index(broken: Path, content: str) -> None:
    (broken / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in message(broken)


def test_index_listing_a_tensor_that_no_shard_holds(broken: Path) -> None:
    index = broken / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["stt_model.asr_head.weight"] = "model.safetensors"
    index.write_text(json.dumps(data))
    text = message(broken)
    assert str(index) in text
    assert "stt_model.asr_head.weight" in text


def test_an_index_that_names_the_wrong_shard(tmp_path: Path) -> None:
    synthesize(tmp_path / "sharded", seed=0, shard_bytes=3 << 20)
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    right = data["weight_map"][Q_PROJ]
    data["weight_map"][Q_PROJ] = next(file for file in data["weight_map"].values() if file != right)
    index.write_text(json.dumps(data))
    assert message(tmp_path / "sharded").endswith(f"1 tensors that are in another shard than it says: {Q_PROJ}")


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_truncated_shard(broken: Path, keep: int) -> None:
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in message(broken)


def test_wrong_shape(broken: Path) -> None:
    rewrite(broken, lambda tensors: tensors.update({Q_PROJ: mx.zeros((7, 96))}))
    text = message(broken)
    assert Q_PROJ in text
    assert "[7, 96]" in text
    assert "[128, 96]" in text


def test_wrong_shape_of_a_convolution_is_told_in_stored_order(broken: Path) -> None:
    name = "stt_model.llm.layers.0.mixer.conv1d.weight"
    rewrite(broken, lambda tensors: tensors.update({name: mx.zeros((3, 1, 4))}))
    text = message(broken)
    assert "[3, 1, 4]" in text
    assert "[320, 1, 4]" in text


def test_wrong_kind_of_number(broken: Path) -> None:
    rewrite(broken, lambda tensors: tensors.update({Q_PROJ: mx.zeros((128, 96), mx.int64)}))
    text = message(broken)
    assert Q_PROJ in text
    assert "int64" in text


def test_missing_tensor(broken: Path) -> None:
    rewrite(broken, drop(Q_PROJ))
    assert message(broken) == f"{broken}: 1 missing tensors: {Q_PROJ}"


def test_extra_tensor(broken: Path) -> None:
    rewrite(broken, lambda tensors: tensors.update({"stt_model.asr_head.weight": mx.zeros((2,))}))
    assert message(broken).endswith("1 tensors that this model does not have: stt_model.asr_head.weight")


def test_long_lists_are_cut(broken: Path) -> None:
    rewrite(broken, lambda tensors: tensors.update({f"extra.{i:03d}": mx.zeros((1,)) for i in range(50)}))
    text = message(broken)
    assert "50 tensors" in text
    assert text.endswith("extra.019 and 30 more")


@pytest.mark.parametrize(
    "name",
    [
        "stt_model.llm.norm_f.weight",
        "stt_model.lm_head.weight",
        "tts_model.audio_prompt_latents.Aria",
        "tts_model.tts_model.mog_head.low_mat",
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_one_number_that_is_not_finite(broken: Path, name: str, value: float) -> None:
    def spoil(tensors: dict[str, mx.array]) -> None:
        array = np.array(tensors[name])
        array.flat[-1] = value
        tensors[name] = mx.array(array)

    rewrite(broken, spoil)
    assert message(broken) == f"{broken}: 1 tensors with values that are not finite: {name}"


@pytest.mark.parametrize("place", [0, 99, 100, 250])
def test_every_block_of_a_large_tensor_is_looked_at(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("voicechat_core.weights.NUMBERS_AT_ONCE", 100)
    numbers = np.zeros((3, 1, 84), np.float32)
    assert is_finite(mx.array(numbers))
    numbers.flat[place] = np.inf
    assert not is_finite(mx.array(numbers))
    assert is_finite(mx.array([1, 2]))


def test_without_an_index_a_missing_shard_is_still_named(tmp_path: Path) -> None:
    synthesize(tmp_path / "sharded", seed=0, shard_bytes=3 << 20)
    (tmp_path / "sharded" / "model.safetensors.index.json").unlink()
    lost = tmp_path / "sharded" / "model-00002-of-00003.safetensors"
    lost.unlink()
    assert message(tmp_path / "sharded") == f"{lost}: this shard is missing"


def test_control_codes_must_follow_the_codebook(broken: Path) -> None:
    rewrite(broken, lambda tensors: tensors.update({"tts_model._control_codes": mx.array([1026, 1025, 1024])}))
    text = message(broken)
    assert "[1026, 1025, 1024]" in text
    assert "[66, 65, 64]" in text


def test_silence_codes_must_lie_in_the_codebook(broken: Path) -> None:
    rewrite(broken, lambda tensors: tensors.update({"tts_model.codec_silence_tokens": mx.full((31,), 64)}))
    text = message(broken)
    assert "codec_silence_tokens" in text
    assert "64" in text


def test_flags_must_be_the_tokenizers(broken: Path) -> None:
    name = "tts_model.tts_model.embed_subword.bos_eos_emb.special_flags"

    def swap(tensors: dict[str, mx.array]) -> None:
        tensors[name] = mx.zeros_like(tensors[name])

    rewrite(broken, swap)
    assert "special_flags[1] is 0 but the tokenizer gives 1" in message(broken)


@pytest.mark.parametrize(("module", "last"), [("subword_flag_emb", 0), ("bos_eos_emb", 1)])
def test_the_flags_last_ids_follow_the_vocabulary(broken: Path, module: str, last: int) -> None:
    name = f"tts_model.tts_model.embed_subword.{module}.pad_tensor"
    size = config_of(broken)["text_config"]["vocab_size"]
    rewrite(broken, lambda tensors: tensors.update({name: mx.array(size + 7)}))
    text = message(broken)
    assert f"embed_subword.{module}.pad_tensor is {size + 7}; vocab_size makes it {size - last}" in text


def test_vocabulary_sizes_that_disagree(broken: Path) -> None:
    text_config = config_of(broken)["text_config"]
    size = text_config["vocab_size"]
    edit_config(broken, text_config=text_config | {"vocab_size": size + 1})
    text = message(broken)
    assert "tokenizer.json" in text
    assert str(size) in text
    assert str(size + 1) in text


@pytest.fixture
def packed(tiny_path: Path, tmp_path: Path) -> Path:
    """A 4-bit build that a test may spoil; every matrix of the language model is packed."""
    convert(tiny_path, tmp_path / "packed", Quantization(4, 32))
    return tmp_path / "packed"


PACKED = Q_PROJ.removesuffix(".weight")


def test_a_packed_build_loads_as_it_is_stored(packed: Path) -> None:
    stored = read_tensors(packed)
    loaded = dict(named_parameters(load(packed).model.networks))
    parts = [f"{PACKED}.{part}" for part in ("weight", "scales", "biases")]
    assert [loaded[name].dtype for name in parts] == [mx.uint32, mx.float32, mx.float32]
    assert all(mx.array_equal(loaded[name], stored[name]) for name in parts)
    assert sum(x.dtype == mx.uint32 for x in loaded.values()) == 2 * 2 + 2 * 2 + 4 + 3


def test_one_module_in_eight_bits(packed: Path, tiny_path: Path) -> None:
    weight = read_tensors(tiny_path)[Q_PROJ]
    parts = mx.quantize(weight, group_size=32, bits=8)
    names = (f"{PACKED}.{part}" for part in ("weight", "scales", "biases"))
    rewrite(packed, lambda tensors: tensors.update(zip(names, parts, strict=True)))
    with_map(packed, {"bits": 8, "group_size": 32})
    module = load(packed).model.networks.stt_model.llm.layers[3].mixer.q_proj
    assert module.quantization == Quantization(8, 32)
    assert mx.array_equal(module.rows(mx.arange(128)), mx.dequantize(*parts, group_size=32, bits=8))


def with_map(path: Path, entry: object) -> None:
    edit_config(path, quantization=config_of(path)["quantization"] | {PACKED: entry})


def test_each_inconsistency_of_a_packed_build_is_refused(packed: Path, tiny_path: Path) -> None:
    good = read_tensors(packed)
    dense = mx.array(np.array(read_tensors(tiny_path)[Q_PROJ]))
    rewrite(packed, drop(Q_PROJ))
    assert message(packed) == f"{packed}: {PACKED} has scales but no weight"
    rewrite(packed, lambda tensors: tensors.update({Q_PROJ: dense}))
    expected = "is there both dense (float32 weight) and quantized (scales): one of the two is needed"
    assert message(packed) == f"{packed}: {PACKED} {expected}"
    rewrite(packed, lambda tensors: tensors.update({Q_PROJ: good[Q_PROJ]}))
    with_map(packed, False)
    expected = "has scales, but config.json says that it is not quantized (false)"
    assert message(packed) == f"{packed}: {PACKED} {expected}"
    with_map(packed, {"bits": 4, "group_size": 64})
    one = mx.zeros((128, 1))
    rewrite(packed, lambda tensors: tensors.update({f"{PACKED}.scales": one, f"{PACKED}.biases": one}))
    assert message(packed) == f"{packed}: {PACKED}: group_size 64 does not divide its 96 inputs"


def test_a_dense_module_that_the_map_calls_quantized_is_loaded_and_named_once(
    packed: Path, tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dense = mx.array(np.array(read_tensors(tiny_path)[Q_PROJ]))

    def unpack(tensors: dict[str, mx.array]) -> None:
        del tensors[f"{PACKED}.scales"], tensors[f"{PACKED}.biases"]
        tensors[Q_PROJ] = dense

    rewrite(packed, unpack)
    module = load(packed).model.networks.stt_model.llm.layers[3].mixer.q_proj
    assert module.quantization is None
    assert mx.array_equal(module.weight, dense)
    (record,) = caplog.records
    said = "config.json says that it is quantized, but its weight is dense and has no scales"
    assert record.message == f"{packed}: {PACKED}: {said}"


def test_two_maps_that_differ_are_told(packed: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_map(packed, {"bits": 4, "group_size": 32, "mode": "affine"})
    load(packed)
    (record,) = caplog.records
    assert record.message == f"{packed}: config.json: quantization and quantization_config differ; the first is taken"


def test_a_conflict_of_many_modules_is_one_line(packed: Path) -> None:
    rewrite(packed, drop(*[name for name in read_tensors(packed) if name.endswith(".biases")]))
    assert message(packed).endswith("embed_tokens has scales but no biases; and 14 more, see voicechat inspect")


def test_equal_codebooks_are_held_once(tiny_path: Path, broken: Path) -> None:
    name = "tts_model.audio_codec.prvq.mus_list.3"

    def level(path: Path) -> tuple[np.ndarray, np.ndarray]:
        tts = load(path).model.networks.tts_model
        return np.asarray(memoryview(tts.tts_model.rvq_embs))[3], np.asarray(
            memoryview(tts.audio_codec.prvq.mus_list[3])
        )

    table, codebook = level(tiny_path)
    assert np.array_equal(table, codebook)
    assert np.shares_memory(table, codebook)
    rewrite(broken, lambda tensors: tensors.update({name: tensors[name] + 1}))
    table, codebook = level(broken)
    assert np.array_equal(table + 1, codebook)
    assert not np.shares_memory(table, codebook)


def pending(arrays: dict[str, mx.array]) -> list[str]:
    """Names of the arrays that are still to be computed: their graph has operations."""
    found = []
    for name, value in arrays.items():
        text = io.StringIO()
        mx.export_to_dot(text, [value])
        if "label" in text.getvalue():
            found.append(name)
    return found


@pytest.mark.parametrize("build", ["tiny_path", "packed", "half"])
def test_nothing_is_left_to_compute(build: str, request: pytest.FixtureRequest) -> None:
    """What is pending belongs to the thread that loaded: another one could not compute it."""
    model = load(request.getfixturevalue(build)).model
    arrays = dict(named_parameters(model.networks)) | {"subword_table": model.subword_table}
    assert len(arrays) >= 349
    assert pending({"sum": mx.zeros((2,)) + 1} | arrays) == ["sum"]


@pytest.fixture
def half(tiny_path: Path, tmp_path: Path) -> Path:
    """A bfloat16 build."""
    convert(tiny_path, tmp_path / "half", dtype="bfloat16")
    return tmp_path / "half"


def test_not_a_directory(tmp_path: Path, broken: Path) -> None:
    assert "no such directory" in message(tmp_path / "absent")
    assert "not a directory" in message(broken / "config.json")
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty" / "config.json") in message(tmp_path / "empty")


def test_no_safetensors_at_all(broken: Path) -> None:
    for file in broken.glob("model*"):
        file.unlink()
    assert "no model.safetensors.index.json and no model*.safetensors" in message(broken)


def test_without_a_transcript_branch(broken: Path) -> None:
    edit_config(broken, rnnt_vocabulary=[])
    rewrite(broken, drop(*[name for name in read_tensors(broken) if "rnnt" in name]))
    assert load(broken).generate(np.zeros(1280, np.float32)).transcript is None


def test_a_load_holds_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a half as wide store is widened: all at once, both would be there, one and a half times the result."""
    monkeypatch.setattr("voicechat_core.weights.NUMBERS_AT_ONCE", 1 << 16)
    synthesize(tmp_path / "deep", preset="deep", dtype="bfloat16", shard_bytes=2 << 20)
    config = VoiceChatConfig.from_file(tmp_path / "deep" / "config.json")
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    networks = load_networks(tmp_path / "deep", config)
    loaded = sum(value.nbytes for name, value in named_parameters(networks) if "mus_list" not in name)
    assert loaded > 2 * sum(p.stat().st_size for p in (tmp_path / "deep").glob("*.safetensors")) * 0.9
    assert mx.get_peak_memory() - before < 1.1 * loaded


def test_the_largest_come_first(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in flight is then least when memory is fullest."""
    sizes: list[int] = []
    compute = weights._compute
    monkeypatch.setattr(weights, "_compute", lambda x, prefix: (sizes.extend(v.size for _, v in x), compute(x, prefix)))
    load_networks(tiny_path, VoiceChatConfig.from_file(tiny_path / "config.json"))
    assert len(sizes) > 300
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("speaker", ["", "a.b", "Aria.", ".", "0", "Aria "])
def test_a_speaker_that_cannot_be_a_tensors_name(broken: Path, speaker: str) -> None:
    edit_config(broken, speaker=speaker)
    assert f"speaker is {speaker!r}; letters, digits, _ and - after a letter are needed" in message(broken)


def test_another_speaker(broken: Path) -> None:
    edit_config(broken, speaker="Zoë-2")
    old, new = (f"tts_model.audio_prompt_latents.{name}" for name in ("Aria", "Zoë-2"))
    rewrite(broken, lambda tensors: tensors.update({new: tensors.pop(old)}))
    found = dict(named_parameters(load(broken).model.networks))[new]
    assert mx.array_equal(found, read_tensors(broken)[new])


def test_an_integer_beyond_32_bits(broken: Path) -> None:
    name = "tts_model.codec_silence_tokens"
    rewrite(broken, lambda tensors: tensors.update({name: tensors[name].astype(mx.int64) + 2**32}))
    assert message(broken) == f"{broken}: {name} has integers beyond 32 bits"


@pytest.mark.parametrize(
    "name",
    [
        "stt_model.perception.preprocessor.evil",
        "tts_model.audio_codec.prvq._variance_list.x.variance",
        "tts_model._control_codes_too",
    ],
)
def test_only_known_tensors_are_passed_over(broken: Path, name: str) -> None:
    rewrite(broken, lambda tensors: tensors.update({name: mx.zeros((2,))}))
    assert message(broken).endswith(f"1 tensors that this model does not have: {name}")


def test_an_index_that_leads_nowhere_is_not_no_index(broken: Path) -> None:
    index = broken / "model.safetensors.index.json"
    index.unlink()
    index.symlink_to(broken / "nowhere")
    assert f"{index}: not an index" in message(broken)


DEEP = '{"a":' * 2000 + "1" + "}" * 2000


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "rnnt_tokenizer/vocab.json"])
def test_json_nested_too_deeply(broken: Path, file: str) -> None:
    config = json.loads((broken / "config.json").read_text())
    if "rnnt" in file:
        del config["rnnt_vocabulary"]
        (broken / "config.json").write_text(json.dumps(config))
        (broken / "rnnt_tokenizer").mkdir(exist_ok=True)
    (broken / file).write_text(DEEP)
    assert str(broken / file) in message(broken)


@pytest.mark.parametrize("depth", [300, 490, 700, 900, 990, 5000])
def test_a_nested_config_is_read_or_refused(broken: Path, depth: int) -> None:
    """How deep each of the steps can go differs between Pythons; none may end in a RecursionError."""
    config = json.loads((broken / "config.json").read_text())
    text = json.dumps(config)[:-1] + ', "deep": ' + '{"a":' * depth + "1" + "}" * (depth + 1)
    (broken / "config.json").write_text(text)
    said = ""
    try:
        load(broken)
    except CheckpointError as error:
        said = str(error)
    assert said == "" if depth == 300 else re.search("^$|nested too deeply|recursion depth", said)


def test_a_name_too_long_for_a_file(broken: Path) -> None:
    index = broken / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {Q_PROJ: "x" * 300}}))
    assert "File name too long" in message(broken)
    assert "cannot be looked at" in message(broken / ("x" * 300) / "y")


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("text_config", {"mamba_num_heads": 1 << 24, "mamba_head_dim": 1 << 24, "n_groups": 1}),
        ("tts_config", {"audio_prompt_duration": 3601.0}),
        ("codec_config", {"n_fft": 1 << 24}),
        ("tts_config", {"num_quantizers": 1 << 20}),
        ("text_config", {"hybrid_override_pattern": "M" * 1025}),
    ],
)
def test_sizes_that_make_no_model(broken: Path, part: str, change: dict[str, object]) -> None:
    edit_config(broken, **{part: config_of(broken)[part] | change})
    assert "config.json" in message(broken)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
def test_a_config_that_is_no_file(broken: Path) -> None:
    (broken / "config.json").unlink()
    os.mkfifo(broken / "config.json")
    assert message(broken) == f"{broken / 'config.json'}: not a file"
