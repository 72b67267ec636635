"""The codec against NVIDIA's, and its stream against its whole-clip decoding, with the goldens' weights."""

import mlx.core as mx
import pytest

from tests.conftest import Golden
from tests.parity.codec_stages import SAMPLES, TOLERANCES, build, difference, stage_errors, stream
from voicechat_core.nn.codec import Codec


@pytest.fixture(scope="module")
def codec(golden: Golden) -> Codec:
    return build(golden)


@pytest.fixture(scope="module")
def errors(codec: Codec, golden: Golden) -> dict[str, float]:
    return stage_errors(codec, golden)


@pytest.mark.parametrize("stage", TOLERANCES)
def test_stage(stage: str, errors: dict[str, float]) -> None:
    assert errors[stage] <= TOLERANCES[stage]


def test_lengths(codec: Codec, golden: Golden) -> None:
    stage = golden.stage("codec")
    assert codec.decode(stage["decode_codes"]).shape[1] == stage["decoded_len"].item() == 12 * 1764
    assert stream(codec, stage["decode_codes"], flush=True).shape[1] == 12 * 1764 + 8


def test_the_quantizer_alone_names_the_golden_codes(codec: Codec, golden: Golden) -> None:
    """From NVIDIA's own latents there is nothing to round differently but the distances."""
    stage = golden.stage("codec")
    assert mx.array_equal(codec.quantize(stage["latents"]), stage["codes"])


def test_the_stream_is_the_whole_eight_samples_later(codec: Codec, golden: Golden) -> None:
    codes = golden.stage("codec")["decode_codes"]
    whole, late = codec.decode(codes), stream(codec, codes)
    assert difference(late[:, 14:], whole[:, 6:-8]) <= SAMPLES  # the first 6 have another envelope
    assert difference(late[:, 8:14], whole[:, :6]) > 10 * SAMPLES
    for wrong in (7, 9):
        assert difference(late[:, wrong + 6 : -1], whole[:, 6 : late.shape[1] - wrong - 1]) > 0.1


@pytest.mark.parametrize("chunk_frames", [2, 3, 6, 12])
def test_chunks_do_not_matter(chunk_frames: int, codec: Codec, golden: Golden) -> None:
    codes = golden.stage("codec")["decode_codes"]
    assert difference(stream(codec, codes, chunk_frames, flush=True), stream(codec, codes, flush=True)) <= 1e-6


@pytest.mark.parametrize("block_frames", [1, 5, 12])
def test_blocks_do_not_matter(block_frames: int, codec: Codec, golden: Golden) -> None:
    stage = golden.stage("codec")
    assert difference(codec.decode(stage["decode_codes"], block_frames), codec.decode(stage["decode_codes"])) <= 1e-6
    samples = stage["wav"][:, 0]
    assert difference(codec.encode(samples, block_frames), codec.encode(samples)) <= 1e-5
