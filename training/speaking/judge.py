"""What the generated codes sound like: words by the independent recogniser, silence where nothing is to be said.

    python -m training.speaking.judge --generated generated.npz --codec codec.safetensors --whisper FOLDER \\
        [--recordings codes.npz]

prints one JSON object: word error and exact sentences of each kind of case, how loud silence is, how many frames after
an interruption it still speaks; and of ``--recordings`` the word error of the held-out sentences' own codes, which
the codec allows at best.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training.codec.finish import load
from training.recogniser import Recogniser, Score
from training.small import small_config
from training.speaking.evaluate import Case, Generated
from training.speaking.tables import Sentences
from voicechat_core.nn.codec import Codec

__all__ = ["frame_levels", "heard", "judge", "quiet_after"]

AUDIBLE = 3e-3  # RMS of a frame: about 30 dB below speech
AROUND = 2  # frames before and after a turn that the recogniser hears with it
Samples = NDArray[np.float32]
Hears = Callable[[Samples, int], str]


def heard(codec: Codec, codes: NDArray[np.uint8]) -> Samples:
    """Codes ``[T, Q]`` as samples."""
    return np.array(codec.decode(mx.array(codes.astype(np.int32))[None])[0], dtype=np.float32)


def frame_levels(samples: Samples, frame: int) -> NDArray[np.float32]:
    """RMS of each whole frame."""
    whole = len(samples) // frame * frame
    return np.asarray(np.sqrt(np.square(samples[:whole].reshape(-1, frame)).mean(axis=1)), np.float32)


def quiet_after(levels: NDArray[np.float32], start: int) -> int:
    """Frames from ``start`` on until nothing is audible any more."""
    loud = np.flatnonzero(levels[start:] > AUDIBLE)
    return int(loud[-1]) + 1 if loud.size else 0


def judge(generated: Generated, codec: Codec, hears: Hears, rate: int, frame: int) -> dict[str, Any]:
    """Figures of all cases, by kind."""
    scores: dict[str, Score] = {}
    stops: list[int] = []
    result: dict[str, Any] = {}
    for case, codes in zip(generated.cases, generated.codes, strict=True):
        samples = heard(codec, codes)
        levels = frame_levels(samples, frame)
        if case.kind == "silence":
            result["silence"] = {"audible_frames": int((levels > AUDIBLE).sum()), "loudest": float(levels.max())}
        elif case.kind == "interrupted":
            stops.append(quiet_after(levels, case.stop - 1))
        else:
            span = slice(max(0, case.start - AROUND) * frame, (case.stop + AROUND) * frame)
            scores.setdefault(case.kind, Score()).add(case.text, hears(samples[span], rate))
    result |= {kind: score.as_dict() for kind, score in scores.items()}
    return result | ({"frames_after_interruption": stops} if stops else {})


def recordings(sentences: Sentences, most: int) -> Generated:
    """The held-out sentences' own codes, in silence."""
    quiet = np.repeat(sentences.silence[None].astype(np.uint8), 4, axis=0)
    held = np.flatnonzero(sentences.held)[:most]
    codes = [np.concatenate([quiet, sentences.speech(i), quiet]) for i in held]
    ids = np.zeros(0, np.int32)
    cases = [Case("recordings", sentences.texts[i], ids, 4, len(c) - 4) for i, c in zip(held, codes, strict=True)]
    return Generated(cases, codes)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generated", type=Path, required=True)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--whisper", type=Path, required=True, help="the recogniser's folder")
    parser.add_argument("--recordings", type=Path, help="codes.npz: judge its held-out sentences, too")
    options = parser.parse_args()
    config = small_config()
    codec, hears = load(options.codec, config.codec_config), Recogniser(options.whisper)
    sizes = config.output_sample_rate, config.output_frame_samples
    result = judge(Generated.read(options.generated), codec, hears, *sizes)
    if options.recordings:
        own = recordings(Sentences.from_file(options.recordings), 60)
        result |= judge(own, codec, hears, *sizes)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
