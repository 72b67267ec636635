"""The speech decoder with small random weights: its sampler against NumPy, its state, guidance, precision."""

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten, tree_map

from voicechat_core.config import CharacterEncoderConfig, MogHeadConfig, TtsConfig
from voicechat_core.errors import InputError
from voicechat_core.nn import state as states
from voicechat_core.nn.ear_tts import EarTTS, EarTtsState
from voicechat_core.nn.gemma import Attention, Derived, RMSNorm, rope_periods
from voicechat_core.nn.heads import merge_heads, split_heads
from voicechat_core.noise import GreedyNoise, KeyedNoise

Floats = npt.NDArray[np.float64]
WIDTH, LEVELS, SIZE, LATENT, VOCAB = 16, 11, 12, 8, 20


def config(guidance_scale: float = 0.7, noise_scale: float = 0.5) -> TtsConfig:
    return TtsConfig(
        guidance_scale=guidance_scale,
        top_p=0.8,
        noise_scale=noise_scale,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        sliding_window=5,
        latent_size=LATENT,
        num_quantizers=LEVELS,
        codebook_size=SIZE,
        character_encoder=CharacterEncoderConfig(
            hidden_size=WIDTH, intermediate_size=24, num_attention_heads=2, num_key_value_heads=2, head_dim=6
        ),
        mog_head=MogHeadConfig(intermediate_size=24, num_layers=2, low_rank=4, num_predictions=9, min_log_std=-1.0),
    )


def network(settings: TtsConfig) -> EarTTS:
    """Random weights; the log standard deviations fall on both sides of their lower bound."""
    rng = np.random.default_rng(0)
    module = EarTTS(settings, VOCAB)

    def draw(parameter: mx.array) -> mx.array:
        if not mx.issubdtype(parameter.dtype, mx.floating):
            return parameter
        return mx.array(rng.standard_normal(parameter.shape).astype(np.float32) * 0.4)

    module.update(tree_map(draw, module.parameters()))
    return module


def numpy_norm(x: Floats, weight: Floats) -> Floats:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + weight))


def numpy_gelu(x: Floats) -> Floats:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def numpy_sample(w: dict[str, Floats], hidden: Floats, u: Floats, epsilon: Floats, settings: TtsConfig) -> list[int]:
    """One frame's codes for hidden ``[2, width]``, in float64 and one pass after the other."""
    codes: list[int] = []
    for draw, (start, count) in enumerate(((0, 1), (1, 2), (3, 8))):
        assert start == len(codes)
        x = hidden + w["embed_code.weight"] @ sum((w["rvq_embs"][q][c] for q, c in enumerate(codes)), np.zeros(LATENT))
        for i in range(2):
            p = f"mog_head.mlp_stack.{i}."
            y = numpy_norm(x, w[p + "pre_norm.weight"])
            y = numpy_gelu(y @ w[p + "mlp.gate_proj.weight"].T) * (y @ w[p + "mlp.up_proj.weight"].T)
            x = x + numpy_norm(y @ w[p + "mlp.down_proj.weight"].T, w[p + "post_norm.weight"])
        x = numpy_norm(x, w["mog_head.mlp_stack.2.weight"])
        v = x[0] + settings.guidance_scale * (x[0] - x[1])
        logits = w["mog_head.proj_logits.weight"] @ v
        probability = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        likelier = np.array([probability[probability > q].sum() for q in probability])
        score = np.where(likelier < settings.top_p, np.log(probability), -np.inf)
        k = int(np.argmax(score - np.log(-np.log(u[draw] + 1e-8) + 1e-8)))
        rho = np.exp(max((w["mog_head.proj_logs.weight"] @ v).item(), settings.mog_head.min_log_std))
        means = (w["mog_head.proj_mus.weight"] @ v).reshape(9, 4)
        mu = rho * (w["mog_head.low_mat"][k] @ means[k]) + w["mog_head.proj_else.weight"] @ v
        rest = mu + rho * epsilon[draw] * settings.noise_scale
        for level in range(start, start + count):
            codes.append(int(np.argmin(((rest - w["rvq_embs"][level]) ** 2).sum(-1))))
            rest = rest - w["rvq_embs"][level][codes[-1]]
    return codes


def test_sampler_against_numpy() -> None:
    settings = config()
    tts, noise = network(settings), KeyedNoise(1, settings)
    weights = {name: np.array(value, np.float64) for name, value in tree_flatten(tts.parameters())}
    hidden = np.random.default_rng(2).standard_normal((40, 2, WIDTH)).astype(np.float32)
    assert tts.passes == ((0, 1), (1, 2), (3, 8))
    for i, pair in enumerate(hidden):
        draws = noise.frame(i, i)
        codes = tts.sample(mx.array(pair)[:, None], draws)
        u, epsilon = (np.array(d, np.float64) for d in draws)
        assert codes[0, 0].tolist() == numpy_sample(weights, pair.astype(np.float64), u, epsilon, settings)


def step_inputs(tts: EarTTS) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(3)
    codes = mx.array(rng.integers(0, SIZE + 1, (1, 1, LEVELS)), mx.int32)
    return mx.array(rng.standard_normal((1, 1, WIDTH)).astype(np.float32)).astype(tts.null_emb.dtype), codes


def test_log_standard_deviation_has_a_lower_bound_and_no_upper() -> None:
    head = network(config()).mog_head
    x = mx.random.normal((200, 1, WIDTH), key=mx.random.key(0))
    raw = np.array(head.proj_logs(x))
    _, log_std = head.gaussian(x, mx.zeros((200, 1), mx.int32), *head.project(x)[1:])
    assert raw.min() < -1
    assert raw.max() > 1
    assert np.array_equal(np.array(log_std), np.maximum(raw, -1.0))


def test_without_guidance_one_row_equals_the_conditional_row_of_two() -> None:
    one, two = network(config(guidance_scale=0.0)), network(config())
    condition, codes = step_inputs(one)
    draws = KeyedNoise(0, config()).frame(0, 0)
    codes_one, hidden_one, state = one.step(condition, codes, draws, one.new_state())
    _, hidden_two, _ = two.step(condition, codes, draws, two.new_state())
    assert hidden_one.shape == (1, 1, WIDTH)
    assert hidden_two.shape == (2, 1, WIDTH)
    assert mx.allclose(hidden_one[0], hidden_two[0], rtol=1e-5, atol=1e-6)  # a batch of another size: rounding
    assert codes_one.shape == (1, 1, LEVELS)
    assert codes_one.dtype == mx.int32
    assert state.caches[0].keys.shape[0] == 1


def test_greedy_codes_do_not_depend_on_the_noise_scale() -> None:
    a, b = network(config(noise_scale=0.5)), network(config(noise_scale=100.0))
    hidden, draws = mx.random.normal((2, 1, WIDTH), key=mx.random.key(4)), GreedyNoise(config()).frame(0, 0)
    assert mx.array_equal(a.sample(hidden, draws), b.sample(hidden, draws))


def test_a_frame_without_codes_is_silent_in_the_audio_branch() -> None:
    tts = network(config())
    assert not mx.any(tts.embed_codes(mx.full((1, 1, LEVELS), SIZE)))


def test_positions_are_counted_in_every_layer() -> None:
    tts = network(config())
    condition, codes = step_inputs(tts)
    state = tts.new_state()
    for _ in range(7):
        _, state = tts.advance(tts.embed_codes(codes), condition, state)
    assert [cache.position for cache in state.caches] == [7] * 6
    assert states.nbytes(state) > 0


def branches(tts: EarTTS, frames: int) -> tuple[mx.array, mx.array]:
    """Audio and text branch of a session, ``[1, frames, WIDTH]`` each."""
    rng = np.random.default_rng(5)
    codes = mx.array(rng.integers(0, SIZE, (1, frames, LEVELS)), mx.int32)
    return tts.embed_codes(codes), mx.array(rng.standard_normal((1, frames, WIDTH)).astype(np.float32))


def advanced(
    tts: EarTTS, inputs: tuple[mx.array, mx.array], state: EarTtsState, start: int, end: int
) -> tuple[mx.array, EarTtsState]:
    """The positions from ``start`` to ``end`` at once."""
    audio, condition = inputs
    return tts.advance(audio[:, start:end], condition[:, start:end], state)


def stepped(tts: EarTTS, inputs: tuple[mx.array, mx.array], state: EarTtsState, start: int, end: int) -> mx.array:
    """Hidden states of the positions from ``start`` to ``end``, one at a time."""
    result = []
    for t in range(start, end):
        hidden, state = advanced(tts, inputs, state, t, t + 1)
        mx.eval(hidden)
        result.append(hidden)
    return mx.concatenate(result, axis=1)


def masked_attention(attention: Attention, x: mx.array, mask: mx.array) -> mx.array:
    """Attention of the whole ``[B, T, width]`` with every key and value there ever was, under a mask ``[T, T]``."""
    queries = attention.rotate(attention.q_norm(split_heads(attention.q_proj(x), attention.heads)), 0)
    keys = attention.rotate(attention.k_norm(split_heads(attention.k_proj(x), attention.kv_heads)), 0)
    values = split_heads(attention.v_proj(x), attention.kv_heads)
    keys, values = (mx.repeat(y, attention.heads // attention.kv_heads, axis=1) for y in (keys, values))
    scores = mx.where(mask, queries @ keys.swapaxes(2, 3) * attention.scale, -mx.inf)
    return attention.o_proj(merge_heads(mx.softmax(scores, axis=-1) @ values))


def masked_backbone(tts: EarTTS, x: mx.array, start: int, pinned: int, newest: int) -> mx.array:
    """Hidden states of all positions where those from ``start`` on are bounded: by masks alone."""
    t, p = np.arange(x.shape[1])[:, None], np.arange(x.shape[1])[None, :]
    kept = (t < start) | (p < pinned) | (t - p < newest)
    for layer in tts.backbone.layers:
        window = layer.self_attn.window or x.shape[1]
        mask = mx.array(kept & (t >= p) & (t - p < window))
        y = masked_attention(layer.self_attn, layer.input_layernorm(x), mask)
        x = x + layer.post_attention_layernorm(y)
        x = x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
    return tts.backbone.norm(x)


# The local layers' window is 5: wider and narrower bounds, all of the prompt pinned and less, and nothing pinned.
@pytest.mark.parametrize(("pinned", "newest"), [(7, 3), (4, 9), (0, 1), (0, 12), (7, 30)])
@pytest.mark.parametrize("start", [7, 25])
def test_a_bounded_history_is_attention_under_its_mask(pinned: int, newest: int, start: int) -> None:
    """Also where it begins late: at 25 positions most bounds drop something at once."""
    tts, end = network(config()), 45
    inputs = branches(tts, end)
    _, state = advanced(tts, inputs, tts.new_state(), 0, start)
    found = stepped(tts, inputs, tts.bounded(state, pinned, newest), start, end)
    expected = masked_backbone(tts, tts.fuse(*inputs), start, pinned, newest)[:, start:]
    assert found.shape == (2, end - start, WIDTH)
    assert mx.allclose(found, expected, rtol=0, atol=1e-5)
    # The bound matters: without it the last states are others.
    whole = masked_backbone(tts, tts.fuse(*inputs), end, pinned, newest)[:, start:]
    assert not mx.allclose(found, whole, rtol=0, atol=1e-3)
    # And the exact state goes on as if there had been no bound.
    found = stepped(tts, inputs, state, start, end)
    assert mx.allclose(found, whole, rtol=0, atol=1e-5)


def test_a_bound_of_the_whole_history_changes_no_bit() -> None:
    tts, end = network(msgspec.structs.replace(config(), sliding_window=40)), 40
    inputs = branches(tts, end)
    _, state = advanced(tts, inputs, tts.new_state(), 0, 7)
    for pinned, newest in ((7, end - 7), (0, end), (7, 1000)):
        found = stepped(tts, inputs, tts.bounded(state, pinned, newest), 7, end)
        assert mx.array_equal(found, stepped(tts, inputs, states.copy(state), 7, end))


def test_a_bounded_state_takes_what_it_keeps_and_counts_on() -> None:
    """Six layers, the first five with a window of 5."""
    tts = network(config())
    inputs = branches(tts, 60)
    _, state = advanced(tts, inputs, tts.new_state(), 0, 7)
    state = tts.bounded(state, 7, 20)
    for t in range(7, 60):
        _, state = advanced(tts, inputs, state, t, t + 1)
    assert [cache.keys.shape for cache in state.caches] == [(2, 2, 12, 6)] * 5 + [(2, 2, 27, 6)]
    assert {(cache.position, cache.pinned, cache.newest) for cache in state.caches} == {(60, 7, 20)}
    with pytest.raises(InputError, match=r"^2 positions at once after 60, but only 12 are kept"):
        advanced(tts, inputs, state, 0, 2)


def test_bfloat16_weights_stay_near_float32() -> None:
    """Two significant digits: rounding of 2^-9 in each matrix of six layers; the stream itself stays float32."""
    full, half = network(config()), network(config())
    half.set_dtype(mx.bfloat16)
    condition, codes = step_inputs(full)
    draws = KeyedNoise(0, config()).frame(0, 0)
    _, expected, _ = full.step(condition, codes, draws, full.new_state())
    new, hidden, state = half.step(condition.astype(mx.bfloat16), codes, draws, half.new_state())
    assert (hidden.dtype, state.caches[0].keys.dtype) == (mx.float32, mx.bfloat16)
    assert new.dtype == mx.int32
    assert int(new.min()) >= 0
    assert int(new.max()) < SIZE
    error = mx.abs(hidden.astype(mx.float32) - expected).max() / mx.abs(expected).max()
    assert 0 < float(error) < 0.05


def test_rope_keeps_its_precision_for_hours() -> None:
    """Angles are float32 products of position and inverse frequency, as in PyTorch; only their sine may differ."""
    dim, position = 72, 50_000
    inverse = np.float32(1) / np.float32(1e4) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    angle = (np.float32(position) * inverse).astype(np.float64)
    pairs = mx.concatenate([mx.ones((1, 1, 1, dim // 2)), mx.zeros((1, 1, 1, dim // 2))], axis=-1)
    turned = mx.fast.rope(
        pairs, dim, traditional=False, base=None, scale=1.0, offset=position, freqs=rope_periods(dim, 1e4)
    )
    expected = np.concatenate([np.cos(angle), np.sin(angle)])
    # One unit in the last place of the largest angle would be 4e-3.
    assert np.abs(np.array(turned)[0, 0, 0] - expected).max() < 1e-6


def test_norm_follows_a_replaced_weight() -> None:
    norm, x = RMSNorm(4), mx.array([[1.0, 2.0, 3.0, 4.0]])
    before = norm(x)
    norm.weight = mx.full((4,), 2.0)
    assert mx.allclose(norm(x), 3 * before, rtol=1e-6)


def test_derived_value_is_computed_once_for_an_array() -> None:
    calls = []
    derived = Derived(lambda x: calls.append(1) or x + 1)  # type: ignore[func-returns-value]
    a = mx.array(1.0)
    assert derived(a) is derived(a)
    assert derived(mx.array(1.0)).item() == 2
    assert len(calls) == 2


def test_derived_value_of_what_is_traced_is_part_of_the_graph_and_not_kept() -> None:
    derived, a, b = Derived(lambda x: 2 * x), mx.array(1.0), mx.array(5.0)
    assert derived(a).item() == 2
    double = mx.compile(lambda x: derived(x) + derived(a))
    assert double(b).item() == 12
    assert double(mx.array(7.0)).item() == 16
    assert derived(a).item() == 2


def test_norm_rounds_bfloat16_once() -> None:
    norm, x = RMSNorm(256), mx.random.normal((8, 256), key=mx.random.key(0)).astype(mx.bfloat16)
    norm.weight = mx.random.normal((256,), key=mx.random.key(1))
    exact = numpy_norm(np.array(x.astype(mx.float32), np.float64), np.array(norm.weight, np.float64))
    expected = mx.array(exact.astype(np.float32)).astype(mx.bfloat16)
    # Float32 arithmetic moves one value in thousands over a rounding boundary; rounding twice moves every fourth.
    assert norm(x).dtype == mx.bfloat16
    assert float((norm(x) != expected).astype(mx.float32).mean()) < 0.005
