"""Drawn tensors are a checkpoint: both the same twice, of the kinds and sizes that files have, computed when wanted."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.bench.checkpoints import FORMATS, quantization_of, write_checkpoint
from tests.bench.drawn import FULL, drawn_tensors, write_description
from voicechat_core.checkpoint import matched
from voicechat_core.config import PUBLISHED_PATTERN, VoiceChatConfig
from voicechat_core.tokenizer import Tokenizer
from voicechat_core.weights import read_tensors


def drawn(folder: Path, preset: str, stored: str) -> tuple[VoiceChatConfig, dict[str, mx.array]]:
    config = write_description(folder, preset)
    tokenizer = Tokenizer.from_directory(folder, config.text_config.vocab_size)
    how = quantization_of(stored)
    return config, drawn_tensors(config, tokenizer, dtype=FORMATS[stored][0], quantization=how)


@pytest.mark.parametrize("stored", FORMATS)
def test_names_shapes_and_formats_are_those_of_files(tmp_path: Path, stored: str) -> None:
    (tmp_path / "drawn").mkdir()
    _, tensors = drawn(tmp_path / "drawn", "tiny", stored)
    files = read_tensors(write_checkpoint(tmp_path, "tiny", stored))
    assert {n: (x.shape, x.dtype) for n, x in tensors.items()} == {n: (x.shape, x.dtype) for n, x in files.items()}


def test_the_same_numbers_of_sensible_size_each_time(tmp_path: Path) -> None:
    (_, one), (_, other) = (drawn(tmp_path, "tiny", "float32") for _ in range(2))
    assert all(mx.array_equal(one[name], other[name]).item() for name in one)
    head = np.array(one["stt_model.lm_head.weight"])
    assert np.std(head) == pytest.approx(96**-0.5, rel=0.05)
    assert not np.allclose(head, np.array(one["stt_model.function_head.weight"]))
    assert np.array(one["tts_model.tts_model.rvq_embs"])[3] == pytest.approx(
        np.array(one["tts_model.audio_codec.prvq.mus_list.3"])
    )


def test_on_the_device_is_drawn_what_is_only_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.bench.drawn.ON_THE_HOST", 0)
    _, tensors = drawn(tmp_path, "tiny", "float32")
    assert np.std(np.array(tensors["stt_model.lm_head.weight"])) == pytest.approx(96**-0.5, rel=0.05)
    assert np.std(np.array(tensors["stt_model.embed_tokens.weight"])) == pytest.approx(0.7, rel=0.05)
    characters = np.array(tensors["tts_model.tts_model.embed_subword.embed_tokens.weight"])
    assert np.std(characters[:-1]) == pytest.approx(0.7, rel=0.05)
    assert not characters[-1].any()
    codebook = np.array(tensors["tts_model.audio_codec.prvq.mus_list.0"])
    assert np.linalg.norm(codebook, axis=-1) == pytest.approx(2.0)


@pytest.mark.parametrize(("stored", "packed"), [("bfloat16", 0), ("4bit", 123)])
def test_the_full_size_is_the_published_one(tmp_path: Path, stored: str, packed: int) -> None:
    config, tensors = drawn(tmp_path, "full", stored)
    assert config.text_config.hybrid_override_pattern == PUBLISHED_PATTERN
    assert len(tensors) == 1632 + 2 * packed
    contents = matched(tensors, config)
    assert (contents.problems, len(contents.plan.modules)) == ([], packed)
    if not packed:
        assert sum(value.size for value in tensors.values()) == 11_095_371_286


def test_what_is_said_to_be_full_is_in_the_config(tmp_path: Path) -> None:
    config, _ = drawn(tmp_path, "full", "float32")
    assert config.text_config.hidden_size == FULL["text_config"]["hidden_size"]
    assert config.tts_config.mog_head.low_rank == 64
    assert len(Tokenizer.from_directory(tmp_path, 131072).vocab()) == 131072
