"""The best that the codec allows: held-out answers as they were recorded, and coded and decoded by the checkpoint."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training import bank, synthesize
from training.codec.audio import Recording
from training.codec.encode import encode_all
from training.recogniser import Hears, score
from training.synthesize import Sentence
from voicechat_core.model import VoiceChatModel
from voicechat_core.offline import speech

__all__ = ["coded", "figures", "make", "present", "read"]

BANK = "answers_test"
QUIET = 4  # frames of silence around what is decoded

Samples = NDArray[np.float32]


def _wanted() -> list[Sentence]:
    """The answers that no training set holds."""
    return [sentence for sentence in synthesize.assistant() if sentence.split == "held"]


def present(folder: Path) -> bool:
    """Whether their bank is there, and holds what it should."""
    file = folder / f"{BANK}.json"
    if not file.exists():
        return False
    listed = json.loads(file.read_text(encoding="utf-8"))["items"]
    return [item["text"] for item in listed] == [sentence.text for sentence in _wanted()]


def make(folder: Path) -> None:
    """Write their bank."""
    said = ((asdict(sentence), synthesize.answer(sentence)) for sentence in _wanted())
    bank.write_flac(folder, BANK, synthesize.ANSWER_RATE, said, synthesize.ANSWER_FILE_BYTES)


def read(folder: Path, count: int) -> list[Recording]:
    """The first ``count`` of them."""
    return [Recording(item, pcm) for item, pcm in zip(*bank.read(folder, BANK), strict=True)][:count]


def coded(model: VoiceChatModel, recordings: Sequence[Recording]) -> list[Samples]:
    """Each recording through the checkpoint's codec, in silence."""
    codec, quiet = model.networks.tts_model.audio_codec, np.repeat(np.array(model.silence_codes[0]), QUIET, axis=0)
    codes = encode_all(codec, model.config.codec_config, list(recordings))
    return [speech(model, mx.array(np.concatenate([quiet, some, quiet]).astype(np.int32))[None]) for some in codes]


def figures(model: VoiceChatModel, recordings: Sequence[Recording], hears: Hears) -> dict[str, Any]:
    """What a recogniser hears of both."""
    rate, texts = model.config.output_sample_rate, [recording.about["text"] for recording in recordings]
    original = [recording.pcm / np.float32(32768) for recording in recordings]
    return {
        name: score(hears, zip(texts, clips, [rate] * len(texts), strict=True)).as_dict()
        for name, clips in (("original", original), ("coded", coded(model, recordings)))
    }
