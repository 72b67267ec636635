"""The verifier itself: what it must pass, what it must name."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from voicechat_core import CheckpointError, GoldensError
from voicechat_core.cli import app
from voicechat_core.verify import compare, report_text, tolerance, verify
from voicechat_core.verify_stages import STAGES

FIXTURE = Path(__file__).parents[2] / "golden" / "fixtures" / "plain"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A goldens folder that a test may spoil, with one stage of each kind that takes little time."""
    path = tmp_path / "goldens-folder"
    shutil.copytree(FIXTURE, path)
    return keep(path, "codec", "llm", "perception_exact", "rnnt", "tts")


@pytest.fixture
def language(folder: Path) -> Path:
    """It with the language model's stage alone, for what is true of any stage."""
    return keep(folder, "llm")


def keep(folder: Path, *stages: str) -> Path:
    """These, and those that they borrow from; the others were never in the folder."""
    known = [stage for stage in STAGES if any(re.fullmatch(stage.files, name) for name in stages)]
    kept = {*stages, *(lender for stage in known for lender in stage.borrowed.values())}
    for file in (folder / "goldens").iterdir():
        if file.stem not in kept:
            file.unlink()
            edit_manifest(folder, lambda tensors, stage=file.stem: forget(tensors, stage))
    return folder


def forget(tensors: dict[str, object], stage: str) -> None:
    for name in [name for name in tensors if name.startswith(f"{stage}/")]:
        del tensors[name]


def edit_manifest(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest["tensors"])
    path.write_text(json.dumps(manifest))


def edit(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None], rehash: bool = True) -> None:
    """Change one golden tensor (None removes it); ``rehash`` makes the manifest agree with the change."""
    stage, tensor = name.split("/", 1)
    path = folder / "goldens" / f"{stage}.safetensors"
    tensors = load_file(path)
    value = change(tensors.pop(tensor))
    if value is not None:
        tensors[tensor] = np.ascontiguousarray(value)
    save_file(tensors, path)
    if rehash and value is not None:
        digest = hashlib.sha256(tensors[tensor].tobytes()).hexdigest()
        edit_manifest(folder, lambda entries: entries[name].update(sha256=digest))  # type: ignore[attr-defined]


def missed(folder: Path) -> dict[str, str]:
    return {f"{c.stage}/{c.tensor}": c.note for c in verify(folder).checks if not c.passed}


def test_it_needs_three_things_and_nothing_else(folder: Path) -> None:
    kept = {"checkpoint", "goldens", "manifest.json"}
    for path in folder.iterdir():
        assert path.name in kept
    report = verify(folder)
    assert report.passed
    assert len(report.checks) > 50


@pytest.mark.parametrize(
    "name",
    ["llm/hidden", "codec/decoded", "tts/step_hidden", "perception_exact/mel", "rnnt/joint_logprobs", "tts/mog_mu"],
)
def test_a_perturbed_float_is_named(folder: Path, name: str) -> None:
    def change(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x.flat[x.size // 2] += 1e-3 * np.abs(x).max()
        return x

    edit(folder, name, change)
    found = missed(folder)
    assert found[name] == ""
    # NVIDIA's hidden states are also what the mixture and the codes are computed from.
    assert name == "tts/step_hidden" or len(found) == 1


@pytest.mark.parametrize("name", ["tts/step_codes", "codec/codes", "perception_exact/rnnt_tokens_ms10"])
def test_one_wrong_integer_is_named(folder: Path, name: str) -> None:
    def change(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x.flat[-1] ^= 1
        return x

    edit(folder, name, change)
    ((found, note),) = missed(folder).items()
    assert found == name
    if "codes" in name:  # there NVIDIA's margins are in the folder, and the place is said
        assert re.fullmatch(r"from \[.*\] on, where NVIDIA's choice is ahead by .*", note)


@pytest.mark.parametrize("name", ["llm/inputs_embeds", "tts/init_audio_mask", "tts/noise_z", "codec/decode_codes"])
def test_any_change_is_seen_by_its_hash(folder: Path, name: str) -> None:
    """Inputs, and tensors that are not compared, have no error of their own."""

    keep(folder, name.split("/")[0])

    def change(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x.flat[0] = x.flat[1] if x.flat[0] != x.flat[1] else 1 - x.flat[0]
        return x

    edit(folder, name, change, rehash=False)
    assert "manifest" in missed(folder)[name]


def test_nan_is_a_miss(language: Path) -> None:
    edit(language, "llm/hidden", lambda x: np.full_like(x, np.nan))
    assert missed(language) == {"llm/hidden": ""}


@pytest.mark.parametrize(("name", "dtype"), [("llm/hidden", np.int32), ("tts/step_codes", np.float32)])
def test_another_kind_of_number_is_a_miss(folder: Path, name: str, dtype: type) -> None:
    keep(folder, name.split("/")[0])
    edit(folder, name, lambda x: x.astype(dtype))
    kind = str(np.dtype(dtype))
    edit_manifest(folder, lambda entries: entries[name].update(dtype=kind))  # type: ignore[attr-defined]
    assert f"{kind} in the golden" in missed(folder)[name]


@pytest.mark.parametrize(
    ("name", "value"),
    [("rnnt/targets", 10**6), ("tts/step_ids", -1), ("codec/decode_codes", 32), ("tts/init_code", 99)],
)
def test_ids_beyond_the_tables_are_refused(folder: Path, name: str, value: int) -> None:
    keep(folder, name.split("/")[0])
    edit(folder, name, lambda x: np.where(np.arange(x.size).reshape(x.shape) == 0, value, x).astype(x.dtype))
    assert str(value) in missed(folder)[name]
    assert "must lie in 0 to" in missed(folder)[name]


def test_an_input_that_is_not_finite_is_named(language: Path) -> None:
    edit(language, "llm/inputs_embeds", lambda x: np.full_like(x, np.inf))
    assert missed(language) == {"llm/inputs_embeds": "not finite: nothing can be computed from it"}


def test_an_input_of_another_rank_is_a_miss_not_a_traceback(folder: Path) -> None:
    edit(folder, "perception_exact/encoded_len", lambda x: x.reshape(1, 1, 1))
    assert any(name.startswith("perception_exact/") for name in missed(folder))


def test_stages_that_are_not_there_are_said(folder: Path) -> None:
    edit(folder, "llm/hidden", lambda x: None)
    edit_manifest(folder, lambda entries: entries.pop("llm/hidden"))
    report = verify(folder)
    assert report.passed
    assert report.absent == ["llm/hidden", "tts_q[0-9]+", "e2e_.*"]
    assert "not in this folder: llm/hidden, tts_q[0-9]+, e2e_.*" in report_text(report)


@pytest.mark.parametrize("key", ["shape", "dtype"])
def test_the_manifest_describes_what_is_there(language: Path, key: str) -> None:
    edit_manifest(language, lambda entries: entries["llm/hidden"].update({key: "another"}))  # type: ignore[attr-defined]
    assert "another in the manifest" in missed(language)["llm/hidden"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tensors": {"no-stage": {}}}', '{"tensors": {"a/b": 3}}'])
def test_a_broken_manifest_is_named(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    with pytest.raises(GoldensError, match=r"manifest\.json: not a manifest"):
        verify(folder)


def test_a_truncated_golden_is_named(folder: Path) -> None:
    path = folder / "goldens" / "codec.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(GoldensError, match=r"codec\.safetensors: not a whole safetensors file"):
        verify(folder)


def test_another_shape_is_told_with_both(language: Path) -> None:
    edit(language, "llm/hidden", lambda x: x[:, :-1])
    (note,) = missed(language).values()
    full = list(load_file(FIXTURE / "goldens" / "llm.safetensors")["hidden"].shape)
    assert str(full) in note
    assert str([1, full[1] - 1, full[2]]) in note


@pytest.mark.parametrize("name", ["llm/hidden", "tts/init_non_prompt_mask"])
def test_a_missing_tensor_is_said_to_be_missing(folder: Path, name: str) -> None:
    keep(folder, name.split("/")[0])
    edit(folder, name, lambda x: None)
    assert missed(folder) == {name: "missing: the manifest lists it"}


def test_a_missing_input_says_what_it_costs(language: Path) -> None:
    edit(language, "llm/inputs_embeds", lambda x: None)
    edit_manifest(language, lambda entries: entries.pop("llm/inputs_embeds"))
    assert missed(language) == {"llm/inputs_embeds": "missing: the stage cannot be computed without it"}


def test_a_missing_stage_is_a_miss_of_all_its_tensors(folder: Path) -> None:
    (folder / "goldens" / "llm.safetensors").unlink()
    found = missed(folder)
    assert set(found.values()) == {"missing: the manifest lists it"}
    assert "llm/hidden" in found


def test_a_tensor_that_no_manifest_knows(language: Path) -> None:
    edit_manifest(language, lambda entries: entries.pop("llm/hidden"))
    assert missed(language) == {"llm/hidden": "left over: the manifest does not list it"}


@pytest.mark.parametrize("part", ["manifest.json", "goldens", "checkpoint"])
def test_a_missing_part(folder: Path, part: str) -> None:
    path = folder / part
    path.unlink() if path.is_file() else shutil.rmtree(path)
    with pytest.raises((GoldensError, CheckpointError)) as caught:
        verify(folder)
    assert str(folder) in str(caught.value)
    assert part in str(caught.value)


def test_a_perturbed_weight_is_seen(folder: Path) -> None:
    path = folder / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    tensors["stt_model.llm.norm_f.weight"] *= np.float32(1.001)
    save_file(tensors, path)
    computed = {"llm/hidden", "llm/hidden_cached", "llm/text_logits", "llm/function_logits"}
    assert set(missed(folder)) == computed | {"checkpoint/model.safetensors"}


def test_a_changed_checkpoint_file_is_named(language: Path) -> None:
    path = language / "checkpoint" / "tokenizer_config.json"
    path.write_text(path.read_text() + "\n")
    (language / "checkpoint" / "special_tokens_map.json").unlink()
    assert missed(language) == {
        "checkpoint/tokenizer_config.json": "changed: its bytes are not the manifest's",
        "checkpoint/special_tokens_map.json": "missing: the manifest lists it",
    }


def test_the_command_prints_a_table_and_exits_with_one(language: Path) -> None:
    from typer.testing import CliRunner

    good = CliRunner().invoke(app, ["verify", str(language)])
    assert good.exit_code == 0
    assert "all within their limits" in good.stdout
    edit(language, "llm/hidden", lambda x: x * 1.01)
    bad = CliRunner().invoke(app, ["verify", str(language)])
    assert bad.exit_code == 1
    (row,) = [line for line in bad.stdout.splitlines() if "MISS " in line]
    assert "llm" in row
    assert "hidden" in row
    assert bad.stdout.endswith("MISSED 1: llm/hidden\n")


def test_integers_are_exact_and_floats_relative() -> None:
    golden = np.array([1.0, -200.0], np.float32)
    assert compare("s", "t", golden + 1e-3, golden, 1e-5).passed
    assert not compare("s", "t", golden + 3e-3, golden, 1e-5).passed
    zeros = np.zeros(3, np.float32)
    assert compare("s", "t", zeros, zeros, 1e-5).passed
    assert not compare("s", "t", zeros + 1e-9, zeros, 1e-5).passed
    ids = np.array([2**24, 2**24 + 1], np.int32)
    assert not compare("s", "t", ids + np.array([0, 1], np.int32), ids, 1.0).passed


def test_tolerances_are_what_their_file_says() -> None:
    assert tolerance("llm", "hidden") == 1e-5
    assert tolerance("codec", "stream_decoded_flush") == tolerance("codec", "decoded") == 5e-5
    assert tolerance("codec", "latents") == 1e-5
    for stage in STAGES:
        assert 0 < tolerance(stage.key, "anything") <= 1e-5


# ------------------------------------------------------------------------- of a checkpoint by its name


@pytest.fixture
def elsewhere(language: Path, tmp_path: Path) -> Path:
    """The checkpoint of ``language``, which is no longer in the folder: the manifest names it."""
    path = Path(shutil.move(language / "checkpoint", tmp_path / "elsewhere"))
    name_checkpoint(language, {"name": str(path), "remake": "make it again"})
    return path


def name_checkpoint(folder: Path, named: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"checkpoint": named}))


def test_a_checkpoint_that_the_manifest_names(language: Path, elsewhere: Path) -> None:
    (elsewhere / "README.md").write_text("not a part of it")
    report = verify(language)
    assert report.passed
    assert {check.stage for check in report.checks} == {"llm"}


def test_another_build_of_a_named_checkpoint_is_measured(language: Path, elsewhere: Path, tmp_path: Path) -> None:
    build = shutil.copytree(elsewhere, tmp_path / "build")
    assert report_text(verify(language, checkpoint=build)).endswith(f"measured, not judged: {build}, float32")


def test_a_named_checkpoint_that_has_changed_ends_it_in_one_line(language: Path, elsewhere: Path) -> None:
    path = elsewhere / "config.json"
    expected = json.loads((language / "manifest.json").read_text())["files"]["config.json"]
    path.write_text(path.read_text() + "\n")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(GoldensError) as caught:
        verify(language)
    assert str(caught.value) == (
        f"{language}: made with another {elsewhere}: config.json has SHA-256 {found[:12]} here, {expected[:12]} in the "
        "manifest; to make it of this one: make it again"
    )


def test_a_named_checkpoint_that_lacks_a_file(language: Path, elsewhere: Path) -> None:
    (elsewhere / "tokenizer_config.json").unlink()
    with pytest.raises(GoldensError, match=r"made with another .*: tokenizer_config\.json is missing here; to make it"):
        verify(language)


def test_a_name_that_is_no_checkpoint(language: Path, tmp_path: Path) -> None:
    name_checkpoint(language, {"name": str(tmp_path / "absent"), "remake": "make it again"})
    with pytest.raises(CheckpointError, match="absent: no such directory"):
        verify(language)


@pytest.mark.parametrize("named", [3, "voicechat-small", {"name": "voicechat-small"}, {"name": 3, "remake": "it"}])
def test_a_manifest_that_names_no_checkpoint_rightly(language: Path, named: object) -> None:
    name_checkpoint(language, named)
    with pytest.raises(GoldensError, match=r"manifest\.json: not a manifest"):
        verify(language)


# ------------------------------------------------------------------------------- measured, not judged


def test_another_precision_is_measured_and_not_judged(folder: Path) -> None:
    report = verify(folder, precision="bfloat16")
    checks = {f"{c.stage}/{c.tensor}": c for c in report.checks}
    hidden = checks["llm/hidden"]
    assert (report.passed, hidden.passed, hidden.limit) == (True, True, None)
    assert hidden.relative is not None
    assert hidden.relative > 100 * tolerance("llm", "hidden")
    assert hidden.rms is not None
    assert 0.002 < hidden.rms < hidden.relative
    assert re.match(r"\d+ of 150 choices differ", checks["llm/function_logits"].note)
    codes = checks["tts/step_codes"]
    assert codes.error is not None
    assert re.match(rf"{codes.error:.0f} of 930 choices differ: \[0, \d+, \d+\] by [\d.e-]+, ", codes.note)
    assert report_text(report).endswith(f"measured, not judged: {folder / 'checkpoint'}, bfloat16")


def test_a_free_run_is_told_where_it_first_leaves_the_golden(tmp_path: Path) -> None:
    """What follows feeds on that; in a stage with NVIDIA's own past each choice is told."""
    folder = tmp_path / "goldens-folder"
    shutil.copytree(FIXTURE, folder)
    for file in (folder / "goldens").iterdir():
        if file.stem != "e2e_plain":
            file.unlink()
            edit_manifest(folder, lambda tensors, stage=file.stem: forget(tensors, stage))
    checks = {check.tensor: check for check in verify(folder, precision="bfloat16").checks}
    codes = checks["codes_from_t1"]
    assert codes.error is not None
    assert codes.error > 100
    assert re.fullmatch(r"from \[0, \d+, \d+\] on, where NVIDIA's choice is ahead by [\d.e-]+", codes.note)


def test_another_build_is_measured_by_its_own_name(folder: Path, tmp_path: Path) -> None:
    build = shutil.copytree(folder / "checkpoint", tmp_path / "build")
    report = verify(folder, checkpoint=build)
    assert report.passed
    assert {check.error for check in report.checks if check.tensor == "step_codes"} == {0}
    assert report_text(report).endswith(f"measured, not judged: {build}, float32")


def test_what_is_measured_must_still_be_numbers_of_the_right_shape(language: Path) -> None:
    edit(language, "llm/hidden", lambda x: np.full_like(x, np.nan))
    edit(language, "llm/layer0", lambda x: x[:, :-1])
    report = verify(language, precision="bfloat16")
    assert {f"{c.stage}/{c.tensor}" for c in report.checks if not c.passed} == {"llm/hidden", "llm/layer0"}
    assert "MISSED 2" in report_text(report)


def test_the_command_measures(language: Path) -> None:
    from typer.testing import CliRunner

    shown = CliRunner().invoke(app, ["verify", str(language), "--precision", "bfloat16"])
    assert shown.exit_code == 0
    assert shown.stdout.endswith(f"measured, not judged: {language / 'checkpoint'}, bfloat16\n")
    assert " ok " not in shown.stdout


def test_transcripts_of_another_build_may_have_another_length() -> None:
    ours, golden = np.array([1, 2], np.int64), np.array([1, 2, 3], np.int64)
    judged, measured = (compare("p", "rnnt_tokens_ms10", ours, golden, limit) for limit in (0.0, None))
    assert (judged.passed, measured.passed) == (False, True)
    assert judged.note == measured.note == "shape [2] here, [3] in the golden"
    assert not compare("p", "codes", ours, golden, None).passed


def test_a_checkpoint_that_is_no_build_of_these_weights(folder: Path, tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tiny_path}: no build of .*: its text_config differs"):
        verify(folder, checkpoint=tiny_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        verify(folder, checkpoint=tmp_path / "absent")
