"""What each parameter and each state is kept in, and that no weight is widened while a frame is computed."""

import io
import re
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.core.checkpoints import rewrite
from voicechat_core import InputError, duplex, load
from voicechat_core.checkpoint import load_model, load_networks
from voicechat_core.config import VoiceChatConfig
from voicechat_core.convert import convert
from voicechat_core.model import VoiceChatModel
from voicechat_core.nn import state as states
from voicechat_core.nn.linear import Joined, matrices
from voicechat_core.nn.perception import PerceptionState
from voicechat_core.nn.rvq import ResidualVQ
from voicechat_core.noise import KeyedNoise
from voicechat_core.precision import check_precision, dtypes, resolved
from voicechat_core.quantization import Quantization
from voicechat_core.weights import named_parameters, read_tensors, write_tensors

F32, BF16 = mx.float32, mx.bfloat16


@pytest.fixture(scope="module")
def builds(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny checkpoint as it is, in bfloat16, and packed with the rest in bfloat16."""
    root = tmp_path_factory.mktemp("builds")
    convert(tiny_path, root / "bf16", dtype="bfloat16")
    convert(tiny_path, root / "4bit", Quantization(4, 32), dtype="bfloat16")
    return {"f32": tiny_path, "bf16": root / "bf16", "4bit": root / "4bit"}


def parameters(path: Path, precision: str = "auto") -> dict[str, mx.array]:
    config = VoiceChatConfig.from_file(path / "config.json")
    return dict(named_parameters(load_networks(path, config, check_precision(precision))))


EXPECTED = {
    "stt_model.perception.encoder.pre_encode.conv.0.weight": F32,
    "stt_model.perception.encoder.pre_encode.conv.3.bias": F32,
    "stt_model.perception.encoder.pre_encode.out.weight": BF16,
    "stt_model.perception.encoder.pre_encode.out.bias": BF16,
    "stt_model.perception.encoder.layers.0.norm_out.weight": F32,
    "stt_model.perception.encoder.layers.0.norm_out.bias": F32,
    "stt_model.perception.encoder.layers.0.conv.batch_norm.bias": F32,
    "stt_model.perception.encoder.layers.0.conv.depthwise_conv.weight": BF16,
    "stt_model.perception.encoder.layers.0.conv.pointwise_conv1.weight": BF16,
    "stt_model.perception.encoder.layers.0.self_attn.pos_bias_u": BF16,
    "stt_model.perception.encoder.layers.0.self_attn.linear_q.weight": BF16,
    "stt_model.perception.proj.weight": BF16,
    "stt_model.perception.proj.bias": BF16,
    "stt_model.rnnt_decoder.prediction.embed.weight": F32,
    "stt_model.rnnt_decoder.prediction.dec_rnn.lstm.weight_hh_l1": F32,
    "stt_model.rnnt_joint.joint_net.2.weight": F32,
    "stt_model.llm.layers.0.norm.weight": F32,
    "stt_model.llm.layers.0.mixer.A_log": F32,
    "stt_model.llm.layers.0.mixer.D": F32,
    "stt_model.llm.layers.0.mixer.dt_bias": F32,
    "stt_model.llm.layers.0.mixer.conv1d.weight": F32,
    "stt_model.llm.layers.0.mixer.conv1d.bias": F32,
    "stt_model.llm.layers.0.mixer.norm.weight": F32,
    "stt_model.llm.norm_f.weight": F32,
    "tts_model.audio_prompt_latents.Aria": F32,
    "tts_model.tts_model.bos_emb": F32,
    "tts_model.tts_model.rvq_embs": F32,
    "tts_model.tts_model.embed_code.weight": BF16,
    "tts_model.tts_model.embed_subword.embed_tokens.weight": BF16,
    "tts_model.tts_model.embed_subword.bos_eos_emb.special_flags": mx.int32,
    "tts_model.tts_model.gated_fusion_audio_text.gate": F32,
    "tts_model.tts_model.gated_fusion_audio_text.text_proj.bias": BF16,
    "tts_model.tts_model.backbone.layers.0.self_attn.k_norm.weight": F32,
    "tts_model.tts_model.backbone.layers.0.self_attn.k_proj.weight": BF16,
    "tts_model.tts_model.mog_head.mlp_stack.3.weight": F32,
    "tts_model.tts_model.mog_head.mlp_stack.0.mlp.up_proj.weight": BF16,
    "tts_model.tts_model.mog_head.proj_logits.weight": F32,
    "tts_model.tts_model.mog_head.proj_logs.weight": F32,
    "tts_model.tts_model.mog_head.proj_else.weight": F32,
    "tts_model.tts_model.mog_head.proj_mus.weight": BF16,
    "tts_model.tts_model.mog_head.low_mat": BF16,
    "tts_model.audio_codec.decoder.layers.1.dwconv.weight": F32,
    "tts_model.audio_codec.decoder.layers.1.pwconv1.bias": F32,
}
MATRICES = {
    "stt_model.embed_tokens": BF16,
    "stt_model.lm_head": BF16,
    "stt_model.llm.layers.0.mixer.in_proj": BF16,
    "stt_model.llm.layers.4.mixer.down_proj": BF16,
}


@pytest.mark.parametrize(("build", "precision"), [("bf16", "auto"), ("bf16", "bfloat16"), ("f32", "bfloat16")])
def test_bfloat16_keeps_matrices_small_and_all_else_wide(builds: dict[str, Path], build: str, precision: str) -> None:
    found = parameters(builds[build], precision)
    expected = EXPECTED | {f"{path}.weight": dtype for path, dtype in MATRICES.items()}
    assert {name: found[name].dtype for name in expected} == expected


def test_packed_weights_keep_their_scales_and_give_what_dense_ones_give(builds: dict[str, Path]) -> None:
    """By themselves they give what their scales are, which is what they compute in; told so, bfloat16."""
    for precision, dense, given in (("auto", BF16, F32), ("bfloat16", BF16, BF16), ("float32", F32, F32)):
        networks = load_model(builds["4bit"], check_precision(precision)).networks
        for path in MATRICES:
            module = matrices(networks)[path]
            assert [module[part].dtype for part in ("weight", "scales", "biases")] == [mx.uint32, F32, F32]
            assert module.dtype == given
        assert networks.stt_model.perception.proj.weight.dtype == dense


def test_scales_stored_in_bfloat16_are_multiplied_in_it(builds: dict[str, Path], tmp_path: Path) -> None:
    """As other software saves them; in float32 they are widened."""
    path = Path(shutil.copytree(builds["4bit"], tmp_path / "resaved"))
    stored = read_tensors(path)
    small = {n: x.astype(BF16) if n.endswith((".scales", ".biases")) else x for n, x in stored.items()}
    mx.eval(small)
    write_tensors(path, small.items())
    name = "stt_model.lm_head.scales"
    assert [parameters(path, p)[name].dtype for p in ("auto", "float32")] == [BF16, F32]
    assert load(path).generate(np.zeros(1280, np.float32)).frames == 1


@pytest.mark.parametrize(
    ("scales", "biases", "kept"),
    [(mx.float16, mx.float16, F32), (F32, BF16, F32), (BF16, F32, F32), (BF16, mx.float16, F32), (BF16, BF16, BF16)],
)
def test_scales_stay_small_only_in_pairs_and_never_float16(scales: mx.Dtype, biases: mx.Dtype, kept: mx.Dtype) -> None:
    """A product takes one dtype, and squares overflow in float16."""
    stored = {"a.lm_head.scales": mx.zeros((2, 2), scales), "a.lm_head.biases": mx.zeros((2, 2), biases)}
    assert dtypes(stored, stored, BF16) == dict.fromkeys(stored, kept)
    assert dtypes(stored, stored, F32) == dict.fromkeys(stored, F32)


@pytest.mark.parametrize("path", ["stt_model.rnnt_joint.enc", "tts_model.tts_model.mog_head.proj_logits"])
def test_what_stays_float32_does_so_when_it_is_packed(path: str) -> None:
    stored = {f"{path}.{part}": mx.zeros((2, 2), BF16) for part in ("scales", "biases")}
    assert dtypes(stored, stored, BF16) == dict.fromkeys(stored, F32)


@pytest.mark.parametrize("build", ["f32", "bf16", "4bit"])
def test_float32_widens_everything(builds: dict[str, Path], build: str) -> None:
    found = parameters(builds[build], "float32")
    assert {x.dtype for x in found.values() if mx.issubdtype(x.dtype, mx.floating)} == {F32}
    exact = parameters(builds["f32"], "float32")
    name = "stt_model.perception.proj.weight"
    assert mx.array_equal(found[name], exact[name] if build == "f32" else exact[name].astype(BF16).astype(F32))


def test_the_codecs_analysis_side_is_kept_as_stored_and_never_rounded(builds: dict[str, Path]) -> None:
    name = "tts_model.audio_codec.encoder.layers.1.pwconv1.weight"
    assert parameters(builds["bf16"], "auto")[name].dtype == BF16
    rounded = parameters(builds["f32"], "bfloat16")[name]
    assert mx.array_equal(rounded, parameters(builds["f32"], "float32")[name])
    assert rounded.dtype == F32


@pytest.mark.parametrize("stored", [F32, BF16])
def test_codebooks_are_kept_as_stored_and_never_rounded(broken: Path, stored: mx.Dtype) -> None:
    """Where they are not the speech decoder's tables; in float32 they are widened."""
    name = "tts_model.audio_codec.prvq.mus_list.0"
    mx.random.seed(0)
    rewrite(broken, lambda tensors: tensors.update({name: mx.random.normal(tensors[name].shape).astype(stored)}))
    book = read_tensors(broken)[name]
    for precision, kept in (("bfloat16", stored), ("float32", F32)):
        found = parameters(broken, precision)[name]
        assert found.dtype == kept
        assert mx.array_equal(found, book.astype(kept))


def test_a_codec_stored_in_bfloat16_computes_in_float32(builds: dict[str, Path]) -> None:
    """Its two loads hold the same numbers, one widened at load and one where they are read."""
    samples = mx.array(np.random.default_rng(0).uniform(-0.5, 0.5, (1, 4 * 1764)).astype(np.float32))
    kept, widened = (load_model(builds["bf16"], p).networks.tts_model.audio_codec for p in ("bfloat16", "float32"))
    latents = kept.encode(samples)
    assert latents.dtype == F32
    assert mx.array_equal(latents, widened.encode(samples))
    assert mx.array_equal(kept.quantize(latents), widened.quantize(latents))


def test_codebooks_stored_in_bfloat16_are_exact_in_float32() -> None:
    """Where they are not the speech decoder's tables, and so stay as they are stored."""
    mx.random.seed(0)
    kept, widened = ResidualVQ(4, 16, 8), ResidualVQ(4, 16, 8)
    kept.mus_list = [mx.random.normal((16, 8)).astype(BF16) for _ in range(4)]
    widened.mus_list = [book.astype(F32) for book in kept.mus_list]
    latents = mx.random.normal((1, 50, 8))
    codes = kept.quantize(latents)
    assert mx.array_equal(codes, widened.quantize(latents))
    assert kept.dequantize(codes).dtype == F32
    assert mx.array_equal(kept.dequantize(codes), widened.dequantize(codes))


def test_auto_is_what_dense_matrices_are_stored_in(builds: dict[str, Path]) -> None:
    def stored(dtype: mx.Dtype) -> dict[str, mx.array]:
        return {"stt_model.perception.proj.weight": mx.zeros((8, 8), dtype), "a.scales": mx.zeros((64, 8))}

    assert resolved("auto", stored(BF16)) == BF16
    assert resolved("auto", stored(F32)) == F32
    assert resolved("auto", stored(mx.float16)) == F32
    assert resolved("auto", {"a.scales": mx.zeros((8, 8), BF16)}) == BF16
    # Most of them decide.
    assert resolved("auto", stored(BF16) | {"stt_model.llm.x": mx.zeros((8, 9))}) == F32
    assert resolved("auto", stored(BF16) | {"stt_model.llm.x": mx.zeros((8, 7))}) == BF16
    # Neither vectors nor what is float32 anyway have a say.
    codec = {"tts_model.audio_codec.decoder.layers.0.weight": mx.zeros((64, 64, 1))}
    assert resolved("auto", stored(BF16) | codec | {"x": mx.zeros((10**6,))}) == BF16
    assert [resolved(p, stored(BF16)) for p in ("float32", "bfloat16")] == [F32, BF16]


def test_a_load_is_in_auto_unless_told_otherwise(builds: dict[str, Path]) -> None:
    assert load(builds["bf16"]).model.networks.stt_model.perception.proj.weight.dtype == BF16


def test_a_precision_that_does_not_exist(tiny_path: Path) -> None:
    for wrong in ("float16", "", "FLOAT32"):
        with pytest.raises(InputError, match=f"precision is '{wrong}'; one of auto, float32, bfloat16 is needed"):
            load(tiny_path, precision=wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- a frame


def after_two_frames(model: VoiceChatModel) -> tuple[list[mx.array], duplex.DuplexState, PerceptionState]:
    """Outputs of the second frame with a prompt before, not computed yet, and its states."""
    noise = KeyedNoise(0, model.config.tts_config)
    perception, codec = model.networks.stt_model.perception, model.networks.tts_model.audio_codec
    _, state = duplex.start(model, model.warm_up(), [5, 6], noise)
    heard, hearing = perception.step(mx.zeros((1, 200)), perception.new_state())
    _, state = duplex.step(model, heard.projected, state, noise)
    states.evaluate([state, hearing])
    heard, hearing = perception.step(mx.random.normal((1, 1280)), hearing)
    frame, state = duplex.step(model, heard.projected, state, noise)
    audio, _ = codec.step(frame.codes, codec.new_state())
    return [frame.text, frame.function, frame.codes, frame.finite, heard.encoded, audio], state, hearing


VIEWS = {"Transpose", "Reshape", "Slice", "Squeeze", "ExpandDims", "Flatten", "Unflatten", "Broadcast", "AsStrided"}


def widened(model: VoiceChatModel, outputs: list[mx.array]) -> set[str]:
    """Names of weights that a graph converts to another dtype, as they are or through a view."""
    text = io.StringIO()
    weights = {**dict(named_parameters(model.networks)), **joint_weights(model)}
    mx.export_to_dot(text, outputs, **weights)
    operations = dict(re.findall(r"\{ (\d+) \[label =\"(\w+)\"", text.getvalue()))
    followers: dict[str, list[str]] = {}
    for source, target in re.findall(r"^\"?([^\" ]+)\"? -> \"?([^\" \n]+)\"?$", text.getvalue(), re.MULTILINE):
        followers.setdefault(source, []).append(target)
    assert len(operations) > 1000

    def reaches(node: str) -> bool:
        kinds = [(operations.get(n), n) for n in followers.get(node, [])]
        return any(
            kind == "AsType" or ((kind is None or kind in VIEWS) and reaches(following)) for kind, following in kinds
        )

    return {name for name in weights if reaches(name)}


def joint_weights(model: VoiceChatModel) -> dict[str, mx.array]:
    """The arrays that matrices of the same input are multiplied as."""
    holders = [*model.networks.modules(), model.functions]
    joined = [value for holder in holders for value in vars(holder).values() if isinstance(value, Joined)]
    joints = [joint for found in joined if (joint := found.ready()) is not None]
    assert len(joints) > 5
    return {f"joint{i}.{name}": x for i, joint in enumerate(joints) for name, x in joint.parameters().items()}


@pytest.mark.parametrize(("build", "precision"), [("bf16", "auto"), ("4bit", "auto"), ("4bit", "float32")])
def test_no_weight_is_converted_in_a_frame(builds: dict[str, Path], build: str, precision: str) -> None:
    model = load_model(builds[build], check_precision(precision))
    outputs, state, hearing = after_two_frames(model)
    arrays = [x for part in (state, hearing) for _, x in states.arrays(part)]
    assert widened(model, outputs + arrays) == set()


def test_a_weight_that_is_converted_is_seen(builds: dict[str, Path]) -> None:
    model = load_model(builds["bf16"], "auto")
    head = model.networks.stt_model.lm_head
    outputs, _, _ = after_two_frames(model)
    wide = mx.ones((1, head.shape[1])) @ head.weight.T
    assert widened(model, [*outputs, wide]) == {"stt_model.lm_head.weight"}


@pytest.mark.parametrize("build", ["bf16", "4bit"])
def test_residual_streams(builds: dict[str, Path], build: str) -> None:
    """float32 in perception, speech decoder and character encoder; the language model's is what its matrices give:
    bfloat16, as NVIDIA's, or float32 where they are packed.
    """
    model = load_model(builds[build], "auto")
    stt, tts = model.networks.stt_model, model.networks.tts_model.tts_model
    assert stt.perception.encoder.pre_encode(mx.zeros((1, 9, 128))).dtype == F32
    assert {x.dtype for x in stt.perception.encoder.layer_outputs(mx.zeros((1, 9, 128)))} == {F32}
    assert {x.dtype for x in stt.llm.layer_outputs(stt.embed_tokens(mx.array([[1, 2]])))} == {
        BF16 if build == "bf16" else F32
    }
    codes = mx.zeros((1, 1, 31), mx.int32)
    audio, condition = tts.embed_codes(codes), model.subword_table[mx.array([[5]])]
    assert (audio.dtype, condition.dtype, tts.fuse(audio, condition).dtype) == (BF16, BF16, F32)
    characters = tts.embed_subword.embed_tokens(mx.array([[1, 2]]))
    encoded = tts.embed_subword.backbone.encoder(characters, mx.array([[True, True]]))
    assert (characters.dtype, encoded.dtype) == (BF16, F32)
    flags = tts.embed_subword.with_flags(mx.zeros((1, 64), BF16), mx.array([5]))
    assert flags.dtype == F32


@pytest.mark.parametrize("build", ["bf16", "4bit"])
def test_caches_are_kept_in_the_activations_dtype(builds: dict[str, Path], build: str) -> None:
    outputs, state, hearing = after_two_frames(load_model(builds[build], "auto"))
    floats = [(n, x) for s in (state, hearing) for n, x in states.arrays(s) if mx.issubdtype(x.dtype, mx.floating)]
    half = [name for name, x in floats if x.dtype == BF16]
    kinds = (".keys", ".values", ".conv", ".attention", ".heard")
    caches = [name for name, _ in floats if name.endswith(kinds) and (build == "bf16" or not name.startswith("llm."))]
    assert half == caches
    # Two Mamba layers, one of attention, seven of the speech decoder, two of the encoder with a convolution each, and
    # the encoder's row that hides what was never heard.
    assert len(half) == (2 + 2 if build == "bf16" else 0) + 7 * 2 + 2 * 2 + 1
    assert outputs[-1].dtype == F32
