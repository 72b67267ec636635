"""An inspection as text and as JSON: nothing cut, nothing that moves the cursor, every name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.core.checkpoints import drop, rewrite
from voicechat_core.inspection import Inspection, Part, Weights, inspect
from voicechat_core.inspection_report import inspection_json, inspection_text
from voicechat_core.quantization import Quantization
from voicechat_core.weights import read_tensors

Q_PROJ = "stt_model.llm.layers.3.mixer.q_proj"
EMPTY = Inspection(Path("somewhere"), None, None, [], [])


def with_settings(bits: dict[int, int]) -> Weights:
    """Weights whose language layers have these bits."""
    modules = {f"stt_model.llm.layers.{layer}.mixer.in_proj": Quantization(n, 64) for layer, n in bits.items()}
    total = Part("total", 0, 0, 0, (), len(modules))
    return Weights([total], total, "float32", {"auto": 0, "float32": 0}, modules, ("f32",), [], [])


def test_settings_that_differ_are_listed_by_path(mixed: Path) -> None:
    text = inspection_text(inspect(mixed)).splitlines()
    start = text.index("  4 bits in groups of 32: 12 modules (llm 12)")
    assert text[start + 1 : start + 5] == [
        "  8 bits in groups of 32: 3 modules (embed_tokens 1, lm_head 1, function_head 1)",
        "    stt_model.embed_tokens: 8 bits in groups of 32",
        "    stt_model.function_head: 8 bits in groups of 32",
        "    stt_model.lm_head: 8 bits in groups of 32",
    ]


def test_the_text_lists_twenty_and_the_json_all() -> None:
    inspection = replace(
        EMPTY, weights=with_settings({**dict.fromkeys(range(30), 4), **dict.fromkeys(range(30, 53), 8)})
    )
    text = inspection_text(inspection).splitlines()
    assert sum(line.endswith(": 8 bits in groups of 64") for line in text) == 20
    assert "    and 3 more" in text
    quantization = inspection_json(inspection)["weights"]["quantization"]
    assert len(quantization["modules"]) == 53
    assert quantization["settings"] == [
        {"bits": 4, "group_size": 64, "modules": 30, "parts": {"llm": 30}},
        {"bits": 8, "group_size": 64, "modules": 23, "parts": {"llm": 23}},
    ]


@pytest.mark.parametrize("width", [1, 40, 160])
@pytest.mark.parametrize("colour", ["", "1"])
def test_the_table_is_never_cut(mixed: Path, monkeypatch: pytest.MonkeyPatch, width: int, colour: str) -> None:
    monkeypatch.setenv("FORCE_COLOR", colour)
    inspection = inspect(mixed)
    text = inspection_text(inspection, width)
    assert "…" not in text
    assert "\x1b" not in text
    assert "�" not in text
    assert inspection.weights is not None
    for part in (*inspection.weights.parts, inspection.weights.total):
        (line,) = [line for line in text.splitlines() if line.startswith(f"│ {part.name} ")]
        cells = [cell.strip() for cell in line.split("│")][1:]
        assert cells[1:4] == [f"{number:,}" for number in (part.tensors, part.parameters, part.bytes)]
        assert cells[5] == (str(part.quantized) if part.quantized else "")
    assert all(kind in text for kind in ("bf16", "i64", "4-bit", "8-bit"))


def test_a_name_cannot_move_the_cursor() -> None:
    text = inspection_text(replace(EMPTY, problems=["extra\x1b[2J\nfoo"]))
    assert "  extra�[2J\\nfoo" in text.splitlines()


def test_json_has_every_name(broken: Path) -> None:
    names = [f"stt_model.perception.encoder.layers.1.{name}.weight" for name in ("norm_out", "norm_conv")]
    norms = [name for name in read_tensors(broken) if "norm" in name]
    assert len(norms) > 20
    assert set(names) < set(norms)
    rewrite(broken, drop(*norms))
    data = inspection_json(inspect(broken))
    assert json.loads(json.dumps(data)) == data
    assert data["weights"]["missing"] == sorted(norms)
    assert data["problems"][0].endswith(f"and {len(norms) - 20} more")
    assert data["passed"] is False


def test_json_of_a_packed_checkpoint(mixed: Path) -> None:
    data = inspection_json(inspect(mixed))
    assert json.loads(json.dumps(data)) == data
    assert data["directory"] == str(mixed)
    assert data["passed"] is True
    assert data["model"] == {
        "model_type": "nemotron_voicechat",
        "speaker": "Aria",
        "layers": 5,
        "text_tokens": 474,
        "pieces": 86,
        "source_revision": None,
        "transcript": True,
    }
    weights = data["weights"]
    assert [part["name"] for part in weights["parts"]] == [part.name for part in inspect(mixed).weights.parts]  # type: ignore[union-attr]
    assert weights["total"]["quantized"] == 15
    assert weights["auto"] == "bfloat16"
    assert weights["quantization"]["modules"][Q_PROJ] == {"bits": 4, "group_size": 32}
    assert weights["quantization"]["scales"] == ["f32"]
    assert (weights["missing"], weights["left_over"]) == ([], [])


def test_no_section_is_longer_than_twenty_lines(broken: Path) -> None:
    index = broken / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model-00001-of-99999.safetensors"}}))
    inspection = inspect(broken)
    assert len(inspection.problems) > 99_000
    text = inspection_text(inspection).splitlines()
    start = text.index("problems:")
    assert text[start + 21] == f"  and {len(inspection.problems) - 20} more"
    assert len(text) < 60
