"""The codec without goldens: the head's known samples, bounds, state, control codes, and what is refused."""

import math

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from voicechat_core.config import CodecConfig
from voicechat_core.errors import InputError, ModelError
from voicechat_core.nn import cores
from voicechat_core.nn import state as states
from voicechat_core.nn.codec import Codec, CodecState
from voicechat_core.nn.convnext import BlockConv1d, BlockConvTranspose1d, DepthwiseConv1d, gelu
from voicechat_core.nn.layout import to_checkpoint
from voicechat_core.nn.stft import Stft, full_overlap, overlap_add

TINY = CodecConfig(base_channels=4, blocks_per_stage=1, latent_dim=6, num_quantizers=3, codebook_size=8)
FRAME = TINY.frame_samples


def random_codec(config: CodecConfig = TINY, seed: int = 0) -> Codec:
    """A codec whose every weight matters."""
    codec = Codec(config)
    draw = np.random.default_rng(seed)

    def weight(value: mx.array) -> mx.array:
        scale = 1 / np.sqrt(max(value.shape[-2], 1)) if value.ndim > 1 else 0.3
        return mx.array(scale * draw.standard_normal(value.shape), mx.float32)

    codec.update(tree_unflatten([(name, weight(value)) for name, value in tree_flatten(codec.parameters())]))
    return codec


@pytest.fixture(scope="module")
def codec() -> Codec:
    return random_codec()


def random_codes(frames: int, batch: int = 1, seed: int = 1) -> mx.array:
    draw = np.random.default_rng(seed)
    return mx.array(draw.integers(0, TINY.codebook_size, (batch, frames, TINY.num_quantizers)), mx.int32)


# ---- the head: numbers that the public ports agree on

FIRST = [
    0, 0, 0, -0.0002385340485, 0.00045015805517, -0.000681425212, 0.00067935953848, -0.00092129345285,
    0.00087806767970, -0.00091894622892, 0.00051487586461, -0.00052542763297,
]  # fmt: skip
LAST = [
    -0.00049215724, -0.00036827676, -0.00038092560, -0.00017253961, -0.00050170015, -0.00035479225, -0.00038785729,
    -0.00016048302,
]  # fmt: skip
FLUSHED = [
    -0.00051116559, -0.00034122678, -0.00039473642, 0.00003802730, -0.00111030100, 0.00015932629, -0.00128113688,
    0.00054932403,
]  # fmt: skip


def head_channels() -> mx.array:
    column, bin_ = np.arange(441)[:, None], np.arange(9)
    channels = np.concatenate([-4 + 0.1 * bin_ + 0.0005 * column, 0.013 * column + 0.17 * bin_], axis=1)
    return mx.array(channels[None], mx.float32)


def test_head_vectors() -> None:
    stft = Stft(16, 4)
    samples, kept = stft.stream(stft.synthesise(head_channels()), stft.new_kept())
    assert samples.shape == (1, 1764)
    for ours, known in ((samples[0, :12], FIRST), (samples[0, -8:], LAST), (stft.flush(kept)[0], FLUSHED)):
        assert np.abs(np.array(ours) - known).max() < 2e-7  # float32 against a float64 rendering
    assert samples[0, :3].tolist() == [0, 0, 0]


def test_whole_inverse_is_divided_by_its_own_envelope() -> None:
    """A float64 rendering: overlap both the columns and the window's squares, crop 6, divide."""
    stft = Stft(16, 4)
    columns = stft.synthesise(head_channels())
    samples, kept = stft.stream(columns, stft.new_kept())
    whole = stft.whole(mx.concatenate([samples, stft.flush(kept)], axis=1))
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(16) / 16)
    total, envelope = np.zeros(1776), np.zeros(1776)
    for s, column in enumerate(np.array(columns[0], np.float64)):
        total[4 * s : 4 * s + 16] += column
        envelope[4 * s : 4 * s + 16] += window**2
    expected = (total / np.where(envelope == 0, 1, envelope))[6:-6]
    assert whole.shape == (1, 1764)
    assert np.abs(np.array(whole[0]) - expected).max() < 2e-7


def test_spectra_are_a_plain_fourier_transform() -> None:
    samples = np.random.default_rng(0).standard_normal(400).astype(np.float32)
    spectra = np.array(Stft(16, 4).analyse(mx.array(samples)[None])[0])
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(16) / 16)
    padded = np.pad(samples.astype(np.float64), 6)
    expected = np.fft.rfft([padded[s : s + 16] * window for s in range(0, 400, 4)])
    assert spectra.shape == (100, 18)
    assert np.abs(spectra - np.concatenate([expected.real, expected.imag], axis=1)).max() < 5e-6  # 16 float32 terms


def test_imaginary_ends_of_the_spectrum_do_not_count() -> None:
    """cos(pi / 2) makes bins 0 and 8 purely imaginary: nothing may be heard of them."""
    channels = np.full((1, 5, 18), -200.0, np.float32)
    channels[:, :, [0, 8]], channels[:, :, [9, 17]] = 3.0, np.pi / 2
    assert mx.abs(Stft(16, 4).synthesise(mx.array(channels))).max().item() < 1e-6


def test_samples_never_exceed_full_scale() -> None:
    """Whatever the network says: 1000 is far beyond what exp can hold."""
    draw = np.random.default_rng(0)
    stft = Stft(16, 4)
    channels = mx.array(draw.choice([-1000.0, -1.0, 1.0, 5.0, 1000.0], (1, 441, 18)), mx.float32)
    samples, kept = stft.stream(stft.synthesise(channels), stft.new_kept())
    whole = stft.whole(mx.concatenate([samples, stft.flush(kept)], axis=1))
    for audio in (samples, whole):
        assert mx.isfinite(audio).all().item()
        assert 0.5 < mx.abs(audio).max().item() <= 1 + 1e-6


def test_overlap_add() -> None:
    columns = mx.array([[[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400]]], mx.float32)
    assert overlap_add(columns, 2)[0].tolist() == [1, 2, 13, 24, 130, 240, 300, 400]


def test_full_overlap_is_the_middle_of_overlap_add() -> None:
    columns = mx.array(np.random.default_rng(0).standard_normal((2, 9, 16)), mx.float32)
    hops = full_overlap(columns, 4)
    assert hops.shape == (2, 6, 4)
    assert mx.allclose(hops.reshape(2, -1), overlap_add(columns, 4)[:, 12:-12], atol=1e-6)


# ---- elementwise parts


def test_gelu_is_the_exact_one() -> None:
    """Against a float64 rendering; an approximation by tanh is 5e-4 away."""
    x = np.concatenate([np.linspace(-12, 12, 24001), [0.0, 1e-30, -1e-30, 1e9, -1e9, 1e30, -1e30]]).astype(np.float32)
    expected = np.array([v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x.astype(np.float64)])
    found = np.array(gelu(mx.array(x)), np.float64)
    assert (np.abs(found - expected) / np.maximum(1, np.abs(expected))).max() < 4e-7
    assert found[24001] == 0
    assert mx.isnan(gelu(mx.array(math.nan))).item()


def test_depthwise_sums_are_mlx_s_convolution() -> None:
    draw = np.random.default_rng(0)
    x, conv = mx.array(draw.standard_normal((2, 14, 3)), mx.float32), DepthwiseConv1d(3, 7)
    for _ in range(2):  # also with other weights than the first
        conv.weight = mx.array(draw.standard_normal(conv.weight.shape), mx.float32)
        conv.bias = mx.array(draw.standard_normal(3), mx.float32)
        assert mx.allclose(conv(x), mx.conv1d(x, conv.weight, groups=3) + conv.bias, atol=1e-5)


# ---- convolutions whose stride is their kernel


def test_block_convolutions_are_mlx_s() -> None:
    draw = np.random.default_rng(0)
    x = mx.array(draw.standard_normal((2, 14, 3)), mx.float32)
    down, up = BlockConv1d(3, 5, 7), BlockConvTranspose1d(3, 5, 7)
    down.weight = mx.array(draw.standard_normal(down.weight.shape), mx.float32)
    up.weight = mx.array(draw.standard_normal(up.weight.shape), mx.float32)
    stored_down = to_checkpoint(down.weight, BlockConv1d.CHECKPOINT_AXES["weight"])  # out, in, kernel
    stored_up = to_checkpoint(up.weight, BlockConvTranspose1d.CHECKPOINT_AXES["weight"])  # in, out, kernel
    assert stored_down.shape == (5, 3, 7)
    assert stored_up.shape == (3, 5, 7)
    expected_down = mx.conv1d(x, stored_down.transpose(0, 2, 1), stride=7)
    expected_up = mx.conv_transpose1d(x, stored_up.transpose(1, 2, 0), stride=7)
    assert mx.allclose(down(x), expected_down, atol=1e-5)
    assert mx.allclose(up(x), expected_up, atol=1e-5)


# ---- lengths, chunks, state


@pytest.mark.parametrize("frames", [1, 2, 7])
def test_lengths(frames: int, codec: Codec) -> None:
    codes = random_codes(frames)
    assert codec.decode(codes).shape == (1, FRAME * frames)
    samples, state = codec.step(codes, codec.new_state())
    assert samples.shape == (1, FRAME * frames)
    assert codec.flush(state).shape == (1, 8)
    assert codec.encode(mx.zeros((1, FRAME * frames))).shape == (1, frames, 6)


def test_nothing_in_nothing_out(codec: Codec) -> None:
    none, state = random_codes(0), codec.new_state()
    assert codec.decode(none).shape == (1, 0)
    samples, after = codec.step(none, state)
    assert samples.shape == (1, 0)
    assert after is state
    assert codec.encode(mx.zeros((2, 0))).shape == (2, 0, 6)


@pytest.mark.parametrize("chunks", [[1] * 6, [2, 2, 2], [3, 3], [1, 4, 1]])
def test_chunks_do_not_matter(chunks: list[int], codec: Codec) -> None:
    codes = random_codes(6)
    at_once, end = codec.step(codes, codec.new_state())
    state, parts, start = codec.new_state(), [], 0
    for chunk in chunks:
        samples, state = codec.step(codes[:, start : start + chunk], state)
        parts.append(samples)
        start += chunk
    assert mx.abs(mx.concatenate(parts, axis=1) - at_once).max().item() < 1e-6
    assert mx.abs(codec.flush(state) - codec.flush(end)).max().item() < 1e-6


def test_stream_is_the_whole_clip_eight_samples_later(codec: Codec) -> None:
    codes = random_codes(6)
    whole = codec.decode(codes, block_frames=4)
    stream, state = codec.step(codes, codec.new_state())
    assert mx.abs(stream[:, 14:] - whole[:, 6:-8]).max().item() < 1e-5
    assert mx.abs(codec.flush(state)[:, :2] - whole[:, -8:-6]).max().item() < 1e-5
    assert mx.abs(stream[:, 14:] - whole[:, 7:-7]).max().item() > 0.1


def test_the_state_has_the_published_size() -> None:
    """18 inputs a channel and stage, and four columns of 16 samples: 194 kB before the first frame."""
    state = Codec(msgspec.structs.replace(CodecConfig(), num_quantizers=1, codebook_size=1)).new_state()
    assert [tail.shape for tail in state.tails] == [(1, 6, c) for c in (1536, 768, 384) for _ in range(3)]
    assert states.nbytes(state) == 3 * 6 * (1536 + 768 + 384) * 4 + 4 * 16 * 4


def test_a_state_does_not_grow(codec: Codec) -> None:
    state = codec.new_state()
    before = states.nbytes(state)
    for _ in range(3):
        _, state = codec.step(random_codes(2), state)
    assert states.nbytes(state) == before


def test_sessions_of_a_batch_do_not_meet(codec: Codec) -> None:
    codes = random_codes(4, batch=2)
    both = codec.decode(codes)
    streamed, _ = codec.step(codes, codec.new_state(2))
    for row in range(2):
        assert mx.abs(codec.decode(codes[row : row + 1]) - both[row]).max().item() < 1e-5
        alone, _ = codec.step(codes[row : row + 1], codec.new_state())
        assert mx.abs(alone - streamed[row]).max().item() < 1e-5


def test_encoding_looks_ahead_six_samples(codec: Codec) -> None:
    """The beginning of a longer clip has the same latents but for its last frame."""
    samples = mx.array(np.random.default_rng(2).uniform(-0.5, 0.5, (1, 6 * FRAME)), mx.float32)
    long, short = codec.encode(samples), codec.encode(samples[:, : 4 * FRAME])
    assert mx.abs(short[:, :3] - long[:, :3]).max().item() < 1e-5
    assert mx.abs(short[:, 3] - long[:, 3]).max().item() > 1e-4


def compiled(codec: Codec, silence: mx.array, state: CodecState):
    """A frame as one compiled function of arrays."""

    def frame(codes: mx.array, arrays: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
        *tails, columns = arrays
        samples, after = codec.step(codec.replace_control_codes(codes, silence), CodecState(tails, columns))
        return samples, [*after.tails, after.columns]

    return mx.compile(frame), [*state.tails, state.columns]


@pytest.mark.parametrize("work", [cores.WORTH_IT, 0])  # on one stream, on two
def test_a_compiled_step_is_the_step(work: int, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1e-6: the C++ compiler may join a product and a sum into one rounding."""
    monkeypatch.setattr(cores, "WORTH_IT", work)
    monkeypatch.setattr(cores, "CORES", 2)
    codes, state = random_codes(5), codec.new_state()
    frame, arrays = compiled(codec, SILENCE, codec.new_state())
    for t in range(5):
        eager, state = codec.step(codes[:, t : t + 1], state)
        samples, arrays = frame(codes[:, t : t + 1], arrays)
        assert mx.abs(samples - eager).max().item() < 1e-6
    for ours, theirs in zip(arrays, [*state.tails, state.columns], strict=True):
        assert mx.allclose(ours, theirs, atol=1e-5)


def test_two_streams_give_what_one_gives(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = random_codes(4, batch=2)
    whole = codec.decode(codes)
    monkeypatch.setattr(cores, "WORTH_IT", 0)
    monkeypatch.setattr(cores, "CORES", 2)
    assert mx.abs(codec.decode(codes) - whole).max().item() < 1e-6


# ---- codes


def test_quantizing_takes_the_lowest_of_equals() -> None:
    twins = random_codec()
    twins.prvq.mus_list[0][5] = twins.prvq.mus_list[0][2]
    codes = twins.quantize(twins.prvq.mus_list[0][5][None, None])
    assert codes.dtype == mx.int32
    assert codes[0, 0, 0].item() == 2


def test_dequantizing_is_a_sum_of_centres(codec: Codec) -> None:
    codes = random_codes(3)
    books = [np.array(book, np.float64) for book in codec.prvq.mus_list]
    expected = sum(books[q][np.array(codes[0, :, q])] for q in range(3))
    assert np.abs(np.array(codec.dequantize(codes)[0]) - expected).max() < 1e-6


def test_codebooks_are_held_once_and_followed() -> None:
    """Laid out side by side they are views of one array; a replaced one is laid out anew."""
    codec, codes = random_codec(), random_codes(3)
    before, held = codec.dequantize(codes), mx.get_active_memory()
    mx.eval(before)
    for _ in range(3):
        assert mx.array_equal(codec.dequantize(codes), before)
    assert mx.get_active_memory() - held < codec.prvq.mus_list[0].nbytes * 2
    codec.prvq.mus_list[1] = codec.prvq.mus_list[1] + 1
    assert mx.allclose(codec.dequantize(codes), before + 1, atol=1e-6)


def test_shared_codebooks_are_those_of_the_array() -> None:
    codec, codes = random_codec(), random_codes(3)
    stack = mx.array(np.random.default_rng(5).standard_normal((3, 8, 6)), mx.float32)
    codec.prvq.share(stack)
    assert all(mx.array_equal(book, own) for book, own in zip(codec.prvq.mus_list, stack, strict=True))
    expected = sum(np.array(stack[q], np.float64)[np.array(codes[0, :, q])] for q in range(3))
    assert np.abs(np.array(codec.dequantize(codes)[0]) - expected).max() < 1e-6
    assert [name for name, _ in tree_flatten(codec.prvq.parameters())] == [f"mus_list.{q}" for q in range(3)]


def test_half_precision_input_is_computed_in_float32(codec: Codec) -> None:
    samples = mx.array(np.random.default_rng(2).uniform(-0.5, 0.5, (1, FRAME)), mx.bfloat16)
    latents = codec.encode(samples)
    assert latents.dtype == mx.float32
    assert mx.array_equal(latents, codec.encode(samples.astype(mx.float32)))
    half = latents.astype(mx.float16)
    assert mx.array_equal(codec.quantize(half), codec.quantize(half.astype(mx.float32)))


def test_silence_codes_are_the_most_frequent_frame(codec: Codec) -> None:
    codes = codec.quantize(codec.encode(mx.zeros((1, 125 * FRAME))))[0].tolist()
    silence = codec.silence_codes().tolist()
    assert codes.count(silence) >= 120  # all but the first three and the last
    assert codes[0] != silence


SILENCE = mx.array([5, 6, 7], mx.int32)


@pytest.mark.parametrize("wrap", [mx.array, np.array])
def test_control_codes_are_replaced_one_by_one(wrap, codec: Codec) -> None:
    codes = wrap([[[0, 7, 3], [8, 1, 2], [1, 9, 10], [8, 9, 10]]])
    replaced = codec.replace_control_codes(codes, SILENCE)
    assert replaced.dtype == mx.int32
    assert replaced.tolist() == [[[0, 7, 3], [5, 1, 2], [1, 6, 7], [5, 6, 7]]]


@pytest.mark.parametrize("code", [-1, 11])
def test_codes_that_do_not_exist_are_refused(code: int, codec: Codec) -> None:
    with pytest.raises(InputError, match=rf"code {code} is outside 0 \.\. 10"):
        codec.replace_control_codes(np.array([[[0, code, 3]]]), SILENCE)


@pytest.mark.parametrize("code", [-1, 8])
def test_decoding_refuses_what_is_not_audio(code: int, codec: Codec) -> None:
    with pytest.raises(InputError, match=rf"code {code} is outside 0 \.\. 7"):
        codec.decode(mx.array([[[0, code, 3]]]))


def test_half_a_frame_is_refused(codec: Codec) -> None:
    with pytest.raises(InputError, match="1765 samples are not a multiple of 1764"):
        codec.encode(mx.zeros((1, 1765)))


def test_not_a_number_is_not_audio() -> None:
    broken = random_codec()
    broken.decoder.layers[-1].weight = broken.decoder.layers[-1].weight * mx.array(np.nan)
    broken.encoder.layers[0].weight = broken.encoder.layers[0].weight * mx.array(np.inf)
    with pytest.raises(ModelError, match="codec samples are not finite"):
        broken.decode(random_codes(1))
    with pytest.raises(ModelError, match="codec latents are not finite"):
        broken.encode(mx.ones((1, FRAME)))
