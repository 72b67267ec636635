"""What rows are drawn from: sentences, their tokens and their codes, laid out for gathers on the device.

A frame is a row of ``sums``: ``sums[f, n]`` is the sum of its first n code vectors, so that whatever part of a frame
is given, and whatever is left of it, is one gather away. Frame 0 is silence.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training.speaking.pacing import DENSE, Variant, Words, positions

__all__ = ["DELAY", "Sentences", "Tables", "natural_end", "prompt_frames", "random_sentences"]

DELAY = 2  # frames from BOS to the first frame of speech (NVIDIA's num_delay_speech_tokens)
SLOTS = 1 << 16  # a sentence's share of them is its weight

Codes = NDArray[np.uint8]


def natural_end(frames: int, tokens: int) -> int:
    """Frames from BOS to EOS: the speech is over, and all tokens are written."""
    return max(DELAY + frames + 1, tokens + 2)


@dataclass(frozen=True)
class Sentences:
    """The assistant's sentences by the codec: ``codes`` ``[F, Q]`` one after another, ``lengths`` ``[N]`` frames.

    ``kinds`` are the domain's, or "carrier". ``held`` ``[N]`` marks those that are never trained on; ``mus``
    ``[Q, K, L]`` are the codebooks and ``silence`` ``[Q]`` the codes of silence.
    """

    texts: tuple[str, ...]
    kinds: tuple[str, ...]
    held: NDArray[np.bool_]
    codes: Codes
    lengths: NDArray[np.int32]
    mus: NDArray[np.float32]
    silence: NDArray[np.int32]

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read ``codes.npz`` as the codec's training writes it."""
        with np.load(path) as file:
            return cls(
                texts=tuple(map(str, file["text"])),
                kinds=tuple(map(str, file["kind"])),
                held=file["split"] != "train",
                codes=file["codes"].astype(np.uint8),
                lengths=file["lengths"].astype(np.int32),
                mus=file["mus"].astype(np.float32),
                silence=file["silence"].astype(np.int32).reshape(-1),
            )

    def __len__(self) -> int:
        """Number of sentences."""
        return len(self.texts)

    def starts(self) -> NDArray[np.int64]:
        """First frame of each sentence, ``[N]``."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def speech(self, index: int) -> Codes:
        """The codes of one sentence, ``[n, Q]``."""
        start = int(self.starts()[index])
        return self.codes[start : start + int(self.lengths[index])]

    def only(self, indices: Sequence[int] | NDArray[Any]) -> "Sentences":
        """The same with some of the sentences."""
        indices = np.asarray(indices, np.int64)
        codes = [self.speech(i) for i in indices]
        return Sentences(
            tuple(self.texts[i] for i in indices), tuple(self.kinds[i] for i in indices), self.held[indices],
            np.concatenate(codes), self.lengths[indices], self.mus, self.silence,
        )  # fmt: skip

    def trained(self) -> NDArray[np.int64]:
        """Indices of the sentences to train on."""
        return np.flatnonzero(~self.held)


def slots(weights: NDArray[np.float64]) -> NDArray[np.int32]:
    """``SLOTS`` sentence indices, each as often as its weight says: a uniform draw of a slot is a weighted one."""
    edges = np.cumsum(weights) / weights.sum()
    middles = (np.arange(SLOTS) + 0.5) / SLOTS
    return np.searchsorted(edges, middles).clip(0, len(weights) - 1).astype(np.int32)


def cumulative(codes: NDArray[Any], mus: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sums of the first 0 to Q code vectors, ``[F, Q]`` -> ``[F, Q + 1, L]``, added in ascending order."""
    levels, _, latent = mus.shape
    result = np.zeros((len(codes), levels + 1, latent), np.float32)
    for level in range(levels):
        result[:, level + 1] = result[:, level] + mus[level][codes[:, level]]
    return result


@dataclass(frozen=True)
class Tables:
    """On the device. ``facts`` ``[V, N, 4]`` int32: a sentence's first frame, frames, first token, places of text.

    Of the V ways to lay text out the first is dense; in others PADs stand between the tokens.
    """

    sums: mx.array  # [F + 1, Q + 1, L] float32
    facts: mx.array
    tokens: mx.array  # [all places of text, of all ways] int32
    slots: mx.array  # [SLOTS] int32, by weight
    short_slots: mx.array  # the same, of sentences that fit into a short row

    @classmethod
    def build(
        cls,
        sentences: Sentences,
        encode: Callable[[str], list[int]],
        weights: NDArray[np.float64],
        longest: int,
        decode: Callable[[list[int]], str] | None = None,
        pad: int = 0,
        variants: Sequence[Variant] = (DENSE,),
    ) -> Self:
        """Lay sentences out. Those of more than ``longest`` frames are drawn for long rows only.

        ``decode`` spells one token; it and ``pad`` are needed for ``variants`` that are not dense.
        """
        written = [some for variant in variants for some in _written(sentences, encode, decode, pad, variant)]
        counts = np.array([len(some) for some in written], np.int32)
        spoken = np.tile(np.stack([1 + sentences.starts(), sentences.lengths], axis=1), (len(variants), 1))
        facts = np.concatenate([spoken, np.stack([np.cumsum(counts) - counts, counts], axis=1)], axis=1)
        facts = facts.astype(np.int32).reshape(len(variants), len(sentences), 4)
        codes = np.concatenate([sentences.silence[None].astype(np.uint8), sentences.codes])
        short = np.where(sentences.lengths <= longest, weights, 0)
        result = cls(
            sums=mx.array(cumulative(codes, sentences.mus)),
            facts=mx.array(facts),
            tokens=mx.array(np.concatenate(written)),
            slots=mx.array(slots(weights)),
            short_slots=mx.array(slots(short if short.any() else weights)),
        )
        mx.eval(result.sums, result.facts, result.tokens, result.slots, result.short_slots)
        return result

    @property
    def levels(self) -> int:
        """Codes a frame."""
        return self.sums.shape[1] - 1


def _written(
    sentences: Sentences,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str] | None,
    pad: int,
    variant: Variant,
) -> list[NDArray[np.int32]]:
    """Each sentence's text from the frame after BOS to the last token, PAD between tokens."""
    ids = [np.array(encode(text), np.int32) for text in sentences.texts]
    if variant.share == 0:
        return ids
    if decode is None:
        raise ValueError("paced text needs the tokens' spelling")
    known = sentences.trained()
    fit = Words.fit([sentences.texts[i] for i in known], sentences.lengths[known])
    rng, result = np.random.Generator(np.random.PCG64(zlib.crc32(repr(variant).encode()))), []
    for text, some, length in zip(sentences.texts, ids, sentences.lengths.tolist(), strict=True):
        times = fit.times(text, [decode([i]) for i in some.tolist()], length)
        places = positions(times, variant, rng)
        row = np.full(places[-1], pad, np.int32)
        row[places - 1] = some
        result.append(row)
    return result


def prompt_frames(sentences: Sentences, count: int) -> NDArray[np.float32]:
    """The speaker's voice prompt as sums of code vectors ``[count, L]``: the longest trained sentences, in silence."""
    quiet = sentences.silence[None].astype(np.uint8)
    longest = sorted(sentences.trained(), key=lambda i: (-int(sentences.lengths[i]), sentences.texts[i]))
    spoken = [quiet, *(x for i in longest[: 1 + count] for x in (sentences.speech(i), quiet))]
    codes = np.concatenate([*spoken, np.repeat(quiet, count, axis=0)])[:count]
    return cumulative(codes, sentences.mus)[:, -1]


def random_sentences(
    known: Mapping[str, str], shape: tuple[int, int, int], seed: int = 0, held: int = 2, longest: int = 30
) -> Sentences:
    """Noise of the right shape, coded by a random codec, for a run without data.

    ``known`` is each text's kind; the first ``held`` are held out. ``shape`` is levels, codes a level, channels.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    levels, size, latent = shape
    lengths = rng.integers(4, longest + 1, len(known)).astype(np.int32)
    smaller = 0.8 ** np.arange(levels, dtype=np.float32)[:, None, None]
    mus = smaller * rng.standard_normal((levels, size, latent), np.float32)
    frames = rng.standard_normal((1 + int(lengths.sum()), latent), np.float32)
    frames[0] = 0
    codes = nearest(frames, mus)
    return Sentences(
        texts=tuple(known),
        kinds=tuple(known.values()),
        held=np.arange(len(known)) < held,
        codes=codes[1:].astype(np.uint8),
        lengths=lengths,
        mus=mus,
        silence=codes[0],
    )


def nearest(latents: NDArray[np.float32], mus: NDArray[np.float32]) -> NDArray[np.int32]:
    """The codes ``[F, Q]`` of latents ``[F, L]``, each level's nearest to what those before it left."""
    residual, codes = latents, []
    for table in mus:
        code = np.argmin(np.square(table).sum(axis=-1) - 2 * residual @ table.T, axis=-1)
        residual = residual - table[code]
        codes.append(code)
    return np.stack(codes, axis=-1).astype(np.int32)
