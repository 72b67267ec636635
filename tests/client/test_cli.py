"""The command where no server is needed: what it refuses, with which status, and what ``--help`` says."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.commands import Ended
from voicechat_client.cli import main

SPOKEN = Path(__file__).parents[1] / "data" / "spoken.wav"
NOBODY = "127.0.0.1:1"
Client = Callable[..., Ended]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Client:
    """The command in this process."""
    monkeypatch.delenv("VOICECHAT_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["voicechat-client", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        found = capsys.readouterr()
        return Ended(int(caught.value.code or 0), found.out, found.err)

    return run


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--out", "{}/no/answer.wav", "there is no directory"),
        ("--out", "{}", "is a directory"),
        ("--events", "{}/no/log", "there is no directory"),
        ("--transcript", "{}/no/words", "there is no directory"),
        ("--stereo", "{}", "is a directory"),
    ],
)
def test_a_place_that_cannot_be_written_is_told_before(
    client: Client, option: str, value: str, said: str, tmp_path: Path
) -> None:
    """Nobody listens there, which would be the next thing to be found out."""
    place = value.format(tmp_path)
    words = ["--out", str(tmp_path / "a.wav")] if option != "--out" else []
    found = client("send", SPOKEN, "--url", "127.0.0.1:1", *words, option, place)
    assert found.status == 1
    assert found.complaint().startswith(f"{place}: {said}")


def test_files_that_are_no_recording(client: Client, tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("no sound")
    (tmp_path / "empty.wav").write_bytes(b"")
    faults = {"text.wav": "cannot be read as audio", "empty.wav": "is empty", "none.wav": "No such file"}
    for name, said in faults.items():
        found = client("send", tmp_path / name, "--url", "127.0.0.1:1", "--out", tmp_path / "out.wav", "--json")
        assert found.status == 1
        assert found.complaint().startswith(f"{tmp_path / name}: ")
        assert said in found.complaint()
        assert found.json()["error"] == found.complaint()


def test_a_file_from_before_stays_when_there_is_no_server(client: Client, tmp_path: Path) -> None:
    out = tmp_path / "answer.wav"
    out.write_bytes(b"from before")
    found = client("send", SPOKEN, "--url", "127.0.0.1:1", "--out", out, "--json")
    assert found.status == 3
    assert "nobody listens on 127.0.0.1:1" in found.complaint()
    assert found.json()["frames"] == 0
    assert out.read_bytes() == b"from before"


@pytest.mark.parametrize(
    "words",
    [
        ["--pace", "slow"],
        ["--tail", "-1"],
        ["--tail", "inf"],
        ["--tail", "nan"],
        ["--chunk-ms", "0"],
        ["--chunk-ms", "nan"],
        ["--seed", "-1"],
        ["--seed", str(2**64)],
        ["--skip-beyond", "0"],
        ["--skip-beyond", "nan"],
        ["--retry-busy", "nan"],
        ["--url", "ftp://host"],
        ["--api-key-file", "/nowhere"],
        ["--out", str(SPOKEN)],
        ["--out", "one.wav", "--stereo", "./one.wav"],
        ["--ca-file", "/nowhere", "--url", "wss://127.0.0.1:1"],
    ],
    ids=" ".join,
)
def test_options_that_cannot_be_meant(
    words: list[str], client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = client("send", SPOKEN, "--url", "127.0.0.1:1", *words)
    assert found.status == 2, found
    assert "Traceback" not in found.err
    assert found.err
    assert found.out == ""
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_status(client: Client) -> None:
    for command in ("send", "ping"):
        found = client(command, "--help")
        assert found.status == 0
        assert "Exit status: 0 all is well" in found.out
        for word in ("no connection", "TLS", "key", "no voicechat server", "busy", "refused", "lost", "130 for Ctrl-C"):
            assert word in found.out
    assert "voicechat-client send question.wav --check CHECKPOINT" in client("send", "--help").out
