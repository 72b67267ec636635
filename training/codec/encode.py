"""Every sentence of the assistant as codes: ``python -m training.codec.encode --help``.

The file holds, in the bank's order: ``text``, ``seed``, ``kind``, ``split`` and ``lengths`` (frames) of each sentence;
``codes`` uint8 ``[sum of lengths, Q]``; and once ``mus`` ``[Q, K, L]`` float32 (the codebooks) and ``silence`` ``[Q]``.
A sentence is encoded after silence, as it stands in a conversation; its last frame is filled with silence.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training.codec import audio
from training.codec.finish import load
from training.codec.network import CodecNetwork
from training.small import small_config
from voicechat_core.config import CodecConfig
from voicechat_core.nn.codec import Codec

__all__ = ["encode_all", "write"]

Codes = NDArray[np.uint8]
FRAMES_AT_ONCE = 3000


def encode_all(codec: Codec, config: CodecConfig, recordings: list[audio.Recording]) -> list[Codes]:
    """Codes ``[T, Q]`` of each recording. Those of like length go through the encoder together."""
    network = CodecNetwork(codec, config)
    result: list[Codes] = [np.zeros((0, config.num_quantizers), np.uint8)] * len(recordings)
    for rows in _batches(recordings, config.frame_samples):
        clips = audio.clips([recordings[i] for i in rows], config.frame_samples)
        codes = np.array(codec.quantize(network.encode(clips.samples))).astype(np.uint8)
        for i, row, frames in zip(rows, codes, clips.frames, strict=True):
            result[i] = row[audio.LEAD_FRAMES : audio.LEAD_FRAMES + frames]
    return result


def _batches(recordings: list[audio.Recording], frame: int) -> list[list[int]]:
    """Indices of recordings, shortest first, such that a batch with its padding has about ``FRAMES_AT_ONCE``."""
    frames = [-(-len(r.pcm) // frame) + audio.LEAD_FRAMES for r in recordings]
    batches: list[list[int]] = [[]]
    for i in sorted(range(len(recordings)), key=frames.__getitem__):
        if batches[-1] and (len(batches[-1]) + 1) * frames[i] > FRAMES_AT_ONCE:
            batches.append([])
        batches[-1].append(i)
    return batches


def write(file: Path, codec: Codec, recordings: list[audio.Recording], codes: list[Codes]) -> None:
    """The file; whole or not at all."""
    abouts = [r.about for r in recordings]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"partial.{file.name}")
    np.savez_compressed(
        partial,
        text=np.array([about["text"] for about in abouts]),
        seed=np.array([about["seed"] for about in abouts]),
        kind=np.array([about.get("kind", "") for about in abouts]),
        split=np.array([about["split"] for about in abouts]),
        lengths=np.array([len(c) for c in codes], np.int32),
        codes=np.concatenate(codes),
        mus=np.array(mx.stack(codec.prvq.mus_list)),
        silence=np.array(codec.silence_codes()),
    )
    partial.replace(file)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--codec", type=Path, required=True, help="codec.safetensors")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--files", type=int, help="how many of the bank's files; all, if not given")
    options = parser.parse_args()
    config = small_config().codec_config
    codec, recordings = load(options.codec, config), audio.read(options.data, options.files)
    codes = encode_all(codec, config, recordings)
    write(options.out, codec, recordings, codes)
    print(f"{options.out}: {len(codes)} sentences, {sum(map(len, codes))} frames")


if __name__ == "__main__":
    main()
