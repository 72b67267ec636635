"""Wrong codecs that look right. Each must be seen: by the goldens, far beyond their tolerances."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.conftest import Golden
from tests.parity.codec_stages import TOLERANCES, build, stage_errors
from voicechat_core.nn import convnext, stft
from voicechat_core.nn.codec import Codec, CodecState

Mutation = Callable[[pytest.MonkeyPatch], None]
DECODED = ("decoded", "stream_decoded", "stream_decoded_flush")


def tanh_gelu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(convnext, "gelu", nn.gelu_approx)


def larger_eps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(convnext, "NORM_EPS", 1e-5)


def reflected_edges(patch: pytest.MonkeyPatch) -> None:
    def reflect(samples: mx.array, edge: int) -> mx.array:
        return mx.concatenate([samples[:, edge:0:-1], samples, samples[:, -2 : -2 - edge : -1]], axis=1)

    patch.setattr(stft, "pad_edges", reflect)


def symmetric_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stft, "hann", np.hanning)


def imaginary_first(patch: pytest.MonkeyPatch) -> None:
    right = stft.forward_dft
    patch.setattr(stft, "forward_dft", lambda size: np.roll(right(size), size // 2 + 1, axis=1))


def conjugated(patch: pytest.MonkeyPatch) -> None:
    right = stft.forward_dft
    patch.setattr(stft, "forward_dft", lambda size: right(size) * np.repeat([1, -1], size // 2 + 1))


def clamp_after_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stft, "window_columns", lambda columns, window: mx.clip(columns * window, -window, window))


def no_clamp(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stft, "window_columns", lambda columns, window: columns * window)


def no_soft_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stft, "magnitude", mx.exp)


def lead_off_by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stft, "crop", lambda raw, ends: raw[:, ends - 1 : -ends - 1])


def interior_envelope_at_the_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stft.Stft, "whole", lambda self, samples: samples[:, self.lead :])


def columns_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = Codec.step

    def step(self: Codec, codes: mx.array, state: CodecState) -> tuple[mx.array, CodecState]:
        samples, state = right(self, codes, state)
        return samples, CodecState(state.tails, mx.zeros_like(state.columns))

    patch.setattr(Codec, "step", step)


def tails_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = Codec.step

    def step(self: Codec, codes: mx.array, state: CodecState) -> tuple[mx.array, CodecState]:
        samples, state = right(self, codes, state)
        return samples, CodecState(self.new_state().tails, state.columns)

    patch.setattr(Codec, "step", step)


def transposed_as_plain(patch: pytest.MonkeyPatch) -> None:
    """The columns of a transposed convolution in reverse, as a correlation would have them."""
    right = convnext.BlockConvTranspose1d.__call__

    def call(self: convnext.BlockConvTranspose1d, x: mx.array) -> mx.array:
        kernel = self.weight.shape[1]
        y = right(self, x)
        return y.reshape(x.shape[0], -1, kernel, y.shape[2])[:, :, ::-1].reshape(y.shape)

    patch.setattr(convnext.BlockConvTranspose1d, "__call__", call)


MUTATIONS: list[tuple[Mutation, tuple[str, ...]]] = [
    (tanh_gelu, ("latents", *DECODED)),
    (larger_eps, ("latents",)),
    (reflected_edges, ("latents",)),
    (symmetric_window, ("latents", *DECODED)),
    (imaginary_first, ("latents", "codes")),
    (conjugated, ("latents", "codes")),
    (clamp_after_window, DECODED),
    (no_clamp, DECODED),
    (no_soft_limit, DECODED),
    (lead_off_by_one, DECODED),
    (interior_envelope_at_the_ends, ("decoded",)),
    (columns_forgotten, ("stream_decoded", "stream_decoded_flush")),
    (tails_forgotten, ("stream_decoded", "stream_decoded_flush")),
    (transposed_as_plain, DECODED),
]


@pytest.mark.parametrize(("mutation", "seen_by"), MUTATIONS, ids=lambda x: getattr(x, "__name__", ""))
def test_mutation_is_seen(
    mutation: Mutation, seen_by: tuple[str, ...], golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    for stage, error in stage_errors(build(golden), golden, seen_by).items():
        assert error > 10 * TOLERANCES[stage], stage
