"""Random checkpoints: true structure, the sizes that were promised, the same from the same seed."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from voicechat_core import CheckpointError, InputError, VoiceChat, load
from voicechat_core.config import PUBLISHED_PATTERN, VoiceChatConfig
from voicechat_core.model import Networks
from voicechat_core.synthetic import PRESETS, preset_config, synthesize
from voicechat_core.weights import named_parameters, read_tensors


@pytest.mark.parametrize(("preset", "millions"), [("tiny", 1.5), ("mid", 325)])
def test_sizes(preset: str, millions: float) -> None:
    """Counted from shapes alone: nothing is computed."""
    parameters = named_parameters(Networks(preset_config(preset)))
    count = sum(value.size for _, value in parameters) / 1e6
    assert 0.9 * millions < count < 1.1 * millions


@pytest.mark.parametrize("preset", PRESETS)
def test_what_every_preset_keeps(preset: str) -> None:
    config = preset_config(preset)
    assert config.audio_config.encoder.att_context_size == (70, 0)
    assert config.audio_config.encoder.subsampling_factor == 8
    assert (config.tts_config.num_quantizers, config.tts_config.num_iterations) == (31, 8)
    assert (config.prompt_frames, config.output_frame_samples) == (37, 1764)
    assert config.text_config.max_position_embeddings == 131072


def test_deep_has_the_true_depths() -> None:
    config = preset_config("deep")
    assert config.audio_config.encoder.n_layers == 24
    assert config.text_config.hybrid_override_pattern == PUBLISHED_PATTERN
    assert config.tts_config.num_hidden_layers == 28
    assert config.codec_config.blocks_per_stage == 3


def test_mid_is_what_was_promised() -> None:
    config = preset_config("mid")
    text, tts, mog = config.text_config, config.tts_config, config.tts_config.mog_head
    assert (text.hidden_size, text.hybrid_override_pattern) == (1024, "M-M-M-M*-M-M-")
    assert (text.num_attention_heads, text.head_dim, text.num_key_value_heads) == (8, 128, 2)
    assert (text.mamba_num_heads, text.mamba_head_dim, text.ssm_state_size) == (32, 64, 64)
    assert (config.audio_config.encoder.n_layers, config.audio_config.encoder.d_model) == (8, 512)
    assert (tts.num_hidden_layers, tts.hidden_size, tts.num_attention_heads, tts.head_dim) == (7, 576, 8, 72)
    assert (mog.num_predictions, mog.low_rank, tts.latent_size, config.codec_config.base_channels) == (
        1024,
        32,
        256,
        192,
    )


def test_a_seed_writes_the_same_weights_and_another_does_not(tiny_path: Path, tmp_path: Path) -> None:
    synthesize(tmp_path / "again", seed=0)
    synthesize(tmp_path / "other", seed=1)
    first, again, other = (read_tensors(path) for path in (tiny_path, tmp_path / "again", tmp_path / "other"))
    assert all(mx.array_equal(first[name], again[name]) for name in first)
    name = "stt_model.lm_head.weight"
    assert not mx.array_equal(first[name], other[name])


def test_the_layout_is_the_published_one(tiny_path: Path) -> None:
    files = {"config.json", "model.safetensors", "model.safetensors.index.json"}
    files |= {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert {p.name for p in tiny_path.iterdir()} == files
    config = json.loads((tiny_path / "config.json").read_text())
    assert config["audio_config"]["encoder"]["att_context_size"] == [[70, 0]]
    assert VoiceChatConfig.from_file(tiny_path / "config.json").rnnt_vocabulary is not None
    tensors = read_tensors(tiny_path)
    assert tensors["stt_model.llm.layers.0.mixer.conv1d.weight"].shape == (320, 1, 4)
    assert tensors["tts_model.codec_silence_tokens"].dtype == mx.int64
    mus = mx.stack([tensors[f"tts_model.audio_codec.prvq.mus_list.{i}"] for i in range(31)])
    assert mx.array_equal(tensors["tts_model.tts_model.rvq_embs"], mus)


def test_activations_are_of_sensible_size(tiny: VoiceChat) -> None:
    """Random as they are, the networks neither die out nor saturate, and both channels and the transcript speak."""
    rng = np.random.Generator(np.random.PCG64(0))
    result = tiny.generate((0.1 * rng.standard_normal(16000 * 4)).astype(np.float32))
    assert 0.02 < np.abs(result.audio).mean() < 0.6
    assert len(set(result.text_tokens)) > 10
    assert len({tuple(row) for row in result.audio_codes.tolist()}) > 40
    assert result.transcript


@pytest.mark.parametrize(
    ("arguments", "words"), [({"preset": "huge"}, ["huge", "tiny, mid, deep"]), ({"seed": -1}, ["seed", "-1"])]
)
def test_arguments_out_of_range(tmp_path: Path, arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        synthesize(tmp_path / "new", **arguments)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        synthesize(tiny_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        synthesize(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        synthesize(tmp_path / "file" / "below")
    assert not [path for path in tmp_path.iterdir() if path.name != "file"]  # nothing is left lying about


def test_an_empty_directory_is_filled_where_and_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "empty", tmp_path / "link"
    target.mkdir(mode=0o700)
    link.symlink_to(target)
    monkeypatch.chdir(target)
    assert synthesize(Path()) > 1_000_000
    load(link)
    assert target.stat().st_mode & 0o777 == 0o700
    for file in target.iterdir():
        file.unlink()
    assert synthesize(link) > 1_000_000
    assert len(list(target.iterdir())) == 6


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise RuntimeError("[write] Unable to write")

    monkeypatch.setattr("voicechat_core.synthetic.write_tensors", full)
    (tmp_path / "old").mkdir()
    for name in ("new", "old"):
        with pytest.raises(CheckpointError, match=r"cannot be written: \[write\] Unable to write"):
            synthesize(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert not list((tmp_path / "old").iterdir())
