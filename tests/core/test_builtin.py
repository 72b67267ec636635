"""The checkpoint that comes with the package."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from voicechat_core import load
from voicechat_core.builtin import SMALL, builtin
from voicechat_core.errors import CheckpointError
from voicechat_core.hub import locate
from voicechat_core.inspection import inspect

MOST_BYTES = 14_000_000  # that it may take in the repository and in a wheel
QUESTION = Path(__file__).parents[1] / "data" / "small" / "plus_awb.wav"


def test_it_is_found_by_name_and_no_other_is() -> None:
    folder = builtin(SMALL)
    assert folder is not None
    assert locate(SMALL) == folder
    assert builtin("voicechat-large") is None


def test_the_name_means_it_wherever_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / SMALL).mkdir()
    assert locate(SMALL) == builtin(SMALL)
    for folder in (f"./{SMALL}", Path(SMALL)):  # who writes a path means the folder
        assert locate(folder) == Path(SMALL)


def test_a_name_that_is_almost_it_is_told_the_right_one() -> None:
    with pytest.raises(CheckpointError, match=r"^voicechat-smal: no such directory; a checkpoint is voicechat-small, "):
        load("voicechat-smal")


def test_it_is_whole_and_small() -> None:
    folder = locate(SMALL)
    assert inspect(folder).passed
    assert sum(file.stat().st_size for file in folder.iterdir()) < MOST_BYTES
    assert (folder / "NOTICE").read_text(encoding="utf-8").startswith("hibari")


def test_it_understands() -> None:
    question = soundfile.read(QUESTION, dtype="float32")[0]
    result = load(SMALL).generate(np.asarray(question), extra_decoding_seconds=3.0)
    assert (result.transcript, result.text) == ("what is nine plus zero", "Nine plus zero is nine.")
    assert np.abs(result.audio).max() > 0.05  # and it does speak, if not yet clearly
