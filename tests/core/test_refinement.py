"""A frame's refinement and the front of a step: few operations, the plain form's values, fit to be compiled."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from tests.core.graphs import compiled_operations, one_norm_each
from voicechat_core.nn.ear_tts import EarTTS
from voicechat_core.nn.gemma import GatedMLP
from voicechat_core.nn.linear import Linear
from voicechat_core.nn.mog_head import MLPLayer
from voicechat_core.nn.sampler import Draws, gumbel, top_p
from voicechat_core.noise import KeyedNoise
from voicechat_core.quantization import Quantization
from voicechat_core.synthetic import preset_config

CONFIG = preset_config("tiny").tts_config
VOCAB = 40


def network() -> EarTTS:
    """The sizes of ``tiny`` and ``deep``, which have the same head; random weights."""
    rng, module = np.random.default_rng(0), EarTTS(CONFIG, VOCAB)

    def draw(parameter: mx.array) -> mx.array:
        if not mx.issubdtype(parameter.dtype, mx.floating):
            return parameter
        inputs = parameter.shape[-1] if parameter.ndim > 1 else 9
        return mx.array(rng.standard_normal(parameter.shape, np.float32) / np.sqrt(inputs))

    module.update(tree_map(draw, module.parameters()))
    return module


@pytest.fixture(scope="module")
def tts() -> EarTTS:
    return network()


def hidden_states(count: int) -> mx.array:
    """Of ``count`` frames: ``[count, 2, 1, H]``."""
    return mx.random.normal((count, 2, 1, CONFIG.hidden_size), key=mx.random.key(5))


def some_codes(count: int) -> mx.array:
    """Of ``count`` frames, with ids that stand for no code among them: ``[count, 1, 1, Q]``."""
    shape = (count, 1, 1, CONFIG.num_quantizers)
    return mx.random.randint(0, CONFIG.codebook_size + 1, shape, key=mx.random.key(6)).astype(mx.int32)


def plain_norm(x: mx.array, weight: mx.array) -> mx.array:
    return x * mx.rsqrt(mx.square(x).mean(axis=-1, keepdims=True) + 1e-6) * (1 + weight)


def plain_gelu(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(np.sqrt(2 / np.pi).item() * (x + 0.044715 * x**3)))


def plain_layer(layer: MLPLayer, x: mx.array) -> mx.array:
    y, mlp = plain_norm(x, layer.pre_norm.weight), layer.mlp
    y = plain_gelu(y @ mlp.gate_proj.weight.T) * (y @ mlp.up_proj.weight.T)
    return x + plain_norm(y @ mlp.down_proj.weight.T, layer.post_norm.weight)


def plain_codes(tts: EarTTS, hidden: mx.array, draws: Draws) -> list[int]:
    """One frame's codes, each projection by itself, all means computed, every sum from the beginning."""
    head, codes, tables = tts.mog_head, [], tts.rvq_embs
    for (start, count), u, normals in zip(tts.passes, *draws, strict=True):
        fixed = sum((tables[level][code] for level, code in enumerate(codes)), mx.zeros((CONFIG.latent_size,)))
        x = hidden + fixed @ tts.embed_code.weight.T
        for layer in head.mlp_stack[:-1]:
            x = plain_layer(layer, x)
        x = plain_norm(x, head.mlp_stack[-1].weight)
        x = (x[0] + CONFIG.guidance_scale * (x[0] - x[1]))[0]
        kept = top_p(head.proj_logits.weight @ x, CONFIG.top_p)
        component = int(mx.argmax(kept - mx.logsumexp(kept) + gumbel(u)))
        means = (head.proj_mus.weight @ x).reshape(head.components, head.rank)
        deviation = mx.exp(mx.maximum(head.proj_logs.weight @ x, head.min_log_std))
        rest = (head.low_mat[component] @ means[component]) * deviation + head.proj_else.weight @ x
        rest = rest + deviation * normals * CONFIG.noise_scale
        for level in range(start, start + count):
            codes.append(int(mx.argmin(mx.square(rest - tables[level]).sum(axis=-1))))
            rest = rest - tables[level][codes[-1]]
    return codes


@pytest.mark.parametrize("compiled", [False, True])
def test_codes_are_those_of_the_plain_form(tts: EarTTS, compiled: bool) -> None:
    """200 frames, each of its own hidden states and draws."""
    noise, hidden = KeyedNoise(3, CONFIG), hidden_states(200)
    mx.eval(tts.sample(hidden[0], noise.frame(0, 0)))
    sample = mx.compile(tts.sample) if compiled else tts.sample
    for index in range(200):
        draws = noise.frame(index, index)
        assert sample(hidden[index], draws)[0, 0].tolist() == plain_codes(tts, hidden[index], draws)


def test_compiled_gaussians_and_inputs_are_the_same_but_for_rounding(tts: EarTTS) -> None:
    draws, condition = KeyedNoise(4, CONFIG).frame(0, 0), mx.random.normal((1, 1, CONFIG.hidden_size))

    def step(hidden: mx.array, draws: Draws, codes: mx.array) -> list[mx.array]:
        drawn = tts.draw(hidden, draws)
        return [drawn.codes, tts.fuse(tts.embed_codes(codes), condition), *drawn.means, *drawn.log_stds]

    compiled = None
    for hidden, codes in zip(hidden_states(5), some_codes(5), strict=True):
        expected = step(hidden, draws, codes)
        mx.eval(expected)
        compiled = compiled or mx.compile(step)
        for ours, theirs in zip(compiled(hidden, draws, codes), expected, strict=True):
            assert mx.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_backbone_inputs_are_those_of_the_plain_fusion(tts: EarTTS) -> None:
    """One frame, and many at once."""
    fusion, null = tts.gated_fusion_audio_text, tts.null_emb
    gate, scale = mx.sigmoid(fusion.gate), mx.sigmoid(fusion.residual_scale)
    for frames in (1, 5):
        audio, condition = (mx.random.normal((1, frames, CONFIG.hidden_size), key=mx.random.key(n)) for n in (7, 8))
        text = mx.concatenate([condition, mx.broadcast_to(null, condition.shape)])
        a, t = (
            p.weight @ (x / d)[..., None] for p, x, d in ((fusion.audio_proj, audio, 31), (fusion.text_proj, text, 1))
        )
        mixed = gate * (a[..., 0] + fusion.audio_proj.bias) + (1 - gate) * (t[..., 0] + fusion.text_proj.bias)
        expected = plain_norm(scale * mixed, fusion.final_norm.weight)
        assert mx.allclose(tts.fuse(audio, condition), expected, rtol=1e-5, atol=1e-5)


def test_the_unconditional_row_follows_replaced_weights() -> None:
    tts, other = network(), network()
    audio, condition = mx.zeros((1, 1, CONFIG.hidden_size)), mx.ones((1, 1, CONFIG.hidden_size))
    mx.eval(tts.fuse(audio, condition))
    for network_ in (tts, other):
        network_.gated_fusion_audio_text.text_proj.bias = mx.full((CONFIG.hidden_size,), 0.5)
    assert mx.array_equal(tts.fuse(audio, condition), other.fuse(audio, condition))
    for network_ in (tts, other):
        network_.null_emb = -2 * network_.null_emb
    assert mx.array_equal(tts.fuse(audio, condition), other.fuse(audio, condition))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gated_mlp_whose_weights_are_inputs_is_not_laid_out_anew(compiled: bool) -> None:
    """As in training: its gradient is the plain form's, and its own weights are as they were."""
    mlp, x = GatedMLP(8, 12), mx.random.normal((3, 8), key=mx.random.key(1))
    weights = [mx.random.normal(shape, key=mx.random.key(n)) for n, shape in ((2, (12, 8)), (3, (12, 8)))]
    mlp.gate_proj.weight, mlp.up_proj.weight = weights
    mx.eval(mlp(x))
    before = mlp.gate_proj.weight, mlp.up_proj.weight

    def loss(gate: mx.array, up: mx.array) -> mx.array:
        mlp.gate_proj.weight, mlp.up_proj.weight = gate, up
        y = mlp(x)
        mlp.gate_proj.weight, mlp.up_proj.weight = before
        return mx.square(y).sum()

    def plain_loss(gate: mx.array, up: mx.array) -> mx.array:
        return mx.square((plain_gelu(x @ gate.T) * (x @ up.T)) @ mlp.down_proj.weight.T).sum()

    gradient = mx.grad(loss, argnums=(0, 1))
    found = (mx.compile(gradient) if compiled else gradient)(*weights)
    for ours, theirs in zip(found, mx.grad(plain_loss, argnums=(0, 1))(*weights), strict=True):
        assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert mx.array_equal(mlp.gate_proj.weight, weights[0])


@pytest.mark.parametrize("bits", [None, 8])
def test_a_components_rows_are_those_that_it_has_in_the_matrix(bits: int | None) -> None:
    """Also packed, where they are the same rows of the packed matrix."""
    head, whole = network().mog_head, Linear(CONFIG.hidden_size, 1, bias=False)
    whole.weight = head.proj_mus.weight
    if bits is not None:
        quantization = Quantization(group_size=64, bits=bits)
        parts = mx.quantize(head.proj_mus.weight, group_size=64, bits=bits)
        for matrix in (head.proj_mus, whole):
            matrix.make_packed(quantization)
            matrix.weight, matrix.scales, matrix.biases = parts
    for component in (0, 1, head.components - 1):
        expected = whole.rows(mx.arange(component * head.rank, (component + 1) * head.rank))
        assert mx.array_equal(head._rows(mx.array([[component]], mx.uint32))[0, 0], expected)


def test_five_passes_take_few_operations(tts: EarTTS, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of ``deep``; it was 443. Of 31 levels are left: a product, a choice, a vector, and what remains.

    The last level's vector and the remainders after each pass are nobody's. A pass takes 34 more, and but the first one
    the product by which it hears what is fixed; beside it are the sums of 3 passes and the joining of the codes.
    """
    draws, hidden = KeyedNoise(0, CONFIG).frame(0, 0), hidden_states(1)[0]
    mx.eval(tts.sample(hidden, draws))
    one_norm_each(monkeypatch)
    found = compiled_operations(lambda h, u, z: tts.sample(h, (u, z)), hidden, *draws)
    levels = 31 + 31 + 30 + 26
    assert found.total() == levels + 5 * 34 + 4 + 3 + 2 == 297


def test_the_front_of_a_step_takes_few_operations(tts: EarTTS, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was 13: three to look codes up and their sum, three products, the mix and its norm."""
    condition, codes = mx.ones((1, 1, CONFIG.hidden_size)), some_codes(1)[0]
    mx.eval(tts.fuse(tts.embed_codes(codes), condition))
    one_norm_each(monkeypatch)
    found = compiled_operations(lambda c, t: tts.fuse(tts.embed_codes(c), t), codes, condition)
    assert found.total() == 9
