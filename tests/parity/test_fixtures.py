"""The committed goldens hold what the parity tests rely on: their bytes, two unlike models, clips that say something.

Files only: no network is built here.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

FIXTURES = Path(__file__).parents[2] / "golden" / "fixtures"
FRAME_SAMPLES = 1280
MEL_HOP = 160
VOICE_PROMPT_POSITIONS = 37
MAX_BYTES = 20_000_000

# what `grouped` must not share with `plain`: the fields of config.json, by the object they stand in
UNLIKE = {
    "text_config": "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads mamba_num_heads "
    "mamba_head_dim ssm_state_size n_groups hybrid_override_pattern",
    "audio_config.encoder": "n_layers d_model n_heads subsampling_conv_channels",
    "audio_config.decoder": "pred_hidden vocab_size",
    "audio_config.joint": "joint_hidden",
    "tts_config": "hidden_size intermediate_size num_hidden_layers num_key_value_heads head_dim sliding_window "
    "latent_size codebook_size guidance_scale top_p noise_scale",
    "tts_config.character_encoder": "intermediate_size num_key_value_heads",
    "tts_config.mog_head": "intermediate_size low_rank num_predictions min_log_std",
    "codec_config": "base_channels blocks_per_stage",
}
UNLIKE_PATHS = [f"{part}.{name}" for part, names in UNLIKE.items() for name in names.split()]


class Folder:
    """One committed folder, read lazily."""

    def __init__(self, name: str) -> None:
        self.path = FIXTURES / name

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))

    @cached_property
    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "checkpoint" / "config.json").read_text(encoding="utf-8"))

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        return load_file(self.path / "checkpoint" / "model.safetensors")

    @cached_property
    def stages(self) -> dict[str, dict[str, np.ndarray]]:
        return {path.stem: load_file(path) for path in (self.path / "goldens").glob("*.safetensors")}

    def setting(self, dotted: str) -> Any:
        """A value of config.json by its path."""
        value: Any = self.config
        for key in dotted.split("."):
            value = value[key]
        return value


FOLDERS = {name: Folder(name) for name in ("plain", "grouped")}
CLIPS = [(name, clip) for name in FOLDERS for clip in ("e2e_plain", "e2e_prompt")]


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest) -> Folder:
    return FOLDERS[request.param]


@pytest.fixture(params=CLIPS, ids="-".join)
def clip(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    name, stage = request.param
    return FOLDERS[name].stages[stage]


def test_the_manifest_describes_every_tensor_and_no_other(folder: Folder) -> None:
    found = {
        f"{stage}/{name}": {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "sha256": hashlib.sha256(tensor.tobytes()).hexdigest(),
        }
        for stage, tensors in folder.stages.items()
        for name, tensor in tensors.items()
    }
    assert found == folder.manifest["tensors"]


def test_the_manifest_describes_every_file_of_the_checkpoint(folder: Folder) -> None:
    files = (folder.path / "checkpoint").iterdir()
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert found == folder.manifest["files"]


def test_a_folder_holds_a_checkpoint_goldens_and_a_manifest_only(folder: Folder) -> None:
    assert {path.name for path in folder.path.iterdir()} == {"checkpoint", "goldens", "manifest.json"}
    index = json.loads((folder.path / "checkpoint" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["weight_map"].keys() == folder.weights.keys()


def test_all_of_it_is_small() -> None:
    assert sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()) < MAX_BYTES


@pytest.mark.parametrize("dotted", [*UNLIKE_PATHS, "function_channel_weight"])
def test_the_two_models_are_unlike(dotted: str) -> None:
    assert FOLDERS["plain"].setting(dotted) != FOLDERS["grouped"].setting(dotted)


@pytest.mark.parametrize("part", ["text_config", "tts_config", "tts_config.character_encoder"])
def test_grouped_has_fewer_key_value_heads_everywhere(part: str) -> None:
    attention = FOLDERS["grouped"].setting(part)
    assert attention["num_key_value_heads"] < attention["num_attention_heads"]


def test_sequences_outlast_every_window(folder: Folder) -> None:
    left_context = folder.setting("audio_config.encoder.att_context_size")[0][0]
    assert folder.stages["perception_exact"]["encoded"].shape[1] > left_context + 8
    window, layers = folder.setting("tts_config.sliding_window"), folder.setting("tts_config.num_hidden_layers")
    assert window < VOICE_PROMPT_POSITIONS
    assert layers > 6, "a global layer, and a local one after it"
    positions = folder.stages["llm"]["hidden"].shape[1]
    assert positions > folder.manifest["meta"]["settings"]["llm"]["chunk_size"]


def test_text_opens_and_closes_turns(clip: dict[str, np.ndarray]) -> None:
    text = clip["tokens_text"][0].tolist()
    assert 1 in text[1:], "BOS where the speech decoder steps"
    assert 2 in text[1:-2], "EOS with steps after it"
    assert 12 in text
    assert len(set(text) - {1, 2, 12}) >= 4


def test_the_function_channel_changes(clip: dict[str, np.ndarray]) -> None:
    spoken = clip["gen_function_timeline"][0, -clip["tokens_text"].shape[1] :]
    assert len(set(spoken.tolist())) >= 4


def test_no_choice_is_near_a_tie(clip: dict[str, np.ndarray]) -> None:
    # float32 noise between two implementations is near 1e-5 here: these leave a factor of ten and more
    spoken = clip["tokens_text"].shape[1]
    assert min(clip["text_margin"][0, -spoken:].min(), clip["function_margin"][0, -spoken:].min()) > 5e-3
    assert clip["code_margin_from_t1"].min() > 4e-4


def test_the_codes_are_those_of_the_steps_after_a_zero_frame(clip: dict[str, np.ndarray]) -> None:
    positions = clip["gen_text_timeline"].shape[1]
    assert clip["codes"].shape == (1, positions, 31)
    assert not clip["codes"][:, 0].any()
    np.testing.assert_array_equal(clip["codes"][:, 1:], clip["codes_from_t1"])


def test_the_transcript_mixes_labels_and_blanks(clip: dict[str, np.ndarray]) -> None:
    tokens, frames, length = clip["rnnt_tokens"], clip["rnnt_frames"], int(clip["encoded_len"][0])
    assert tokens.shape == frames.shape
    assert len(set(tokens.tolist())) >= 5
    assert 4 <= len(set(frames.tolist())) < length, "frames with labels, and frames with blank alone"
    assert frames.max() < length
    assert (np.diff(frames) >= 0).all()


def test_clips_end_within_a_frame() -> None:
    """``grouped`` ends where NVIDIA's encoder gives one frame more than the length that it states."""
    rest = {name: folder.stages["e2e_plain"]["wav"].shape[1] % FRAME_SAMPLES for name, folder in FOLDERS.items()}
    assert rest["plain"] >= 2 * MEL_HOP
    assert MEL_HOP <= rest["grouped"] < 2 * MEL_HOP
    beyond = {
        name: folder.stages["e2e_plain"]["encoded"].shape[1] - int(folder.stages["e2e_plain"]["encoded_len"][0])
        for name, folder in FOLDERS.items()
    }
    assert beyond == {"plain": 0, "grouped": 1}


def test_flag_rows_of_ordinary_tokens_are_not_zero(folder: Folder) -> None:
    for table in ("subword_flag_emb.cont_emb", "bos_eos_emb.special_emb"):
        assert np.abs(folder.weights[f"tts_model.tts_model.embed_subword.{table}.weight"][0]).max() > 0.1


def test_eight_quantizers_are_the_first_of_thirty_one(folder: Folder) -> None:
    few, all_levels = folder.stages["tts_q8"], folder.stages["tts"]
    assert few["step_codes"].shape[-1] == 8
    np.testing.assert_array_equal(few["init_code"], all_levels["init_code"][..., :8])
    np.testing.assert_array_equal(few["step_ids"], all_levels["step_ids"])
    end_of_turn = few["step_ids"][0].tolist().index(2)
    silence = folder.weights["tts_model.codec_silence_tokens"][:8]
    np.testing.assert_array_equal(few["step_prev_codes"][0, end_of_turn], silence)


def test_the_limits_are_met(folder: Folder) -> None:
    """Step sizes below a floor of 1e-3, and mixture deviations at their least: dropping either shows."""
    llm, tts = folder.stages["llm"], folder.stages["tts"]
    floored = np.abs(llm["hidden_dtmin_0.001"] - llm["hidden"]).max()
    assert floored > 1e-2 * np.abs(llm["hidden"]).max()
    at_least = folder.setting("tts_config.mog_head.min_log_std")
    assert tts["mog_logs"].min() == pytest.approx(at_least)
    assert tts["mog_logs"].max() > at_least + 0.5
