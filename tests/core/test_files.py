"""Directories that appear whole: beside others that are written at the same time, and after failures."""

from collections.abc import Callable
from pathlib import Path

import pytest

from voicechat_core import CheckpointError, files
from voicechat_core.files import written_whole


def write(draft: Path, *names: str) -> None:
    for name in names:
        (draft / name).write_text(name)


def make(target: Path, *names: str, then: Callable[[], object] = lambda: None) -> None:
    """A directory with these files; ``then`` happens when they are written and the directory is not there yet."""
    with written_whole(target) as draft:
        write(draft, *names)
        then()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_it_appears_when_all_is_there(tmp_path: Path) -> None:
    target = tmp_path / "a" / "target"
    with written_whole(target) as draft:
        write(draft, "x")
        assert not target.exists()
        (hidden,) = names(target.parent)
        assert hidden.startswith(".target.partial-")
    assert names(target.parent) == {"target"}
    assert names(target) == {"x"}


def test_an_empty_directory_is_filled_and_keeps_its_rights(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    inode = target.stat().st_ino
    with written_whole(target) as draft:
        write(draft, "x")
        (draft / "folder").mkdir()
        write(draft / "folder", "y")
    assert names(target) == {"x", "folder"}
    assert names(target / "folder") == {"y"}
    assert (target.stat().st_ino, target.stat().st_mode & 0o777) == (inode, 0o700)


@pytest.mark.parametrize("is_there", [False, True])
def test_of_two_at_the_same_time_one_is_refused(tmp_path: Path, is_there: bool) -> None:
    target = tmp_path / "target"
    if is_there:
        target.mkdir()
    with pytest.raises(CheckpointError, match=f"{target}: exists already"):
        make(target, "shared", "slow", then=lambda: make(target, "fast"))
    assert names(tmp_path) == {"target"}
    assert names(target) == {"fast"}


def test_a_directory_that_comes_up_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(CheckpointError, match=f"{target}: exists already: it was made while this was written"):
        make(target, "x", then=lambda: target.write_text("a file"))
    assert target.read_text() == "a file"
    assert names(tmp_path) == {"target"}


def test_what_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    write(tmp_path / "full", "mine")
    for name in ("file", "full"):
        with pytest.raises(CheckpointError, match=f"{name}: exists already and is not an empty directory"):
            make(tmp_path / name, then=lambda: pytest.fail("it was begun"))
    assert names(tmp_path) == {"file", "full"}
    assert names(tmp_path / "full") == {"mine"}


def test_what_a_killed_run_left_inside_hinders_nobody(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / ".target.partial-1").mkdir(parents=True)
    make(target, "x")
    assert names(target) == {".target.partial-1", "x"}


def test_a_draft_that_cannot_be_made_takes_none_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = tmp_path / ".target.partial-1"
    others.mkdir()
    write(others, "x")
    monkeypatch.setattr(files, "_draft_of", lambda directory, inside: others)
    with pytest.raises(CheckpointError, match=r"target: cannot be written: .*File exists"):
        make(tmp_path / "target", then=lambda: pytest.fail("it was begun"))
    assert names(others) == {"x"}


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def interrupt() -> None:
        assert len(names(tmp_path)) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "target", "x", then=interrupt)
    assert names(tmp_path) == set()
