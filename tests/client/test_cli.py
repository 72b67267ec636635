"""The command where no server is needed: what it refuses, with which status, and what ``--help`` says."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import soundfile
import trio

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


def broken(path: Path, samples: list[float]) -> Path:
    soundfile.write(path, np.array(samples, np.float32), 16000, subtype="FLOAT")
    return path


def test_what_cannot_be_done_asks_no_server_and_touches_no_file(client: Client, tmp_path: Path) -> None:
    """Nobody listens there, which would be the next thing to be found out."""
    out = tmp_path / "answer.wav"
    out.write_bytes(b"from before")
    cases: list[tuple[list[object], str]] = [
        ([broken(tmp_path / "none.wav", [])], "none.wav: holds no samples"),
        ([broken(tmp_path / "nan.wav", [0.0] * 100 + [np.nan])], "nan.wav: sample 100 (at 0.006 s) is not finite: nan"),
        ([broken(tmp_path / "first.wav", [np.nan] * 100)], "first.wav: sample 0 (at 0.000 s) is not finite: nan"),
        (["/dev/zero"], "/dev/zero: is a device; a file or a pipe is needed"),
        ([tmp_path], f"{tmp_path}: Is a directory"),
        ([SPOKEN, "--check", tmp_path / "nowhere"], "voicechat inspect failed with 1: "),
    ]
    for words, said in cases:
        found = client("send", *words, "--url", NOBODY, "--out", out, "--stereo", out.with_suffix(".s"))
        assert (found.status, found.out) == (1, "")
        assert said in found.complaint()
        assert out.read_bytes() == b"from before"
        assert not out.with_suffix(".s").exists()


def test_a_check_without_its_command(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = client("send", SPOKEN, "--url", NOBODY, "--out", tmp_path / "a.wav", "--check", "somewhere")
    assert (found.status, found.complaint()) == (
        1,
        '--check needs the command voicechat: install "voicechat-core[mlx]"',
    )


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
        ["--silent-seconds", "0"],
        ["--silent-seconds", "nan"],
        ["--tool", "dice"],
        ["--tool", "dice=/no/where"],
        ["--tools", "--check", "checkpoint"],
        ["--out", "-"],
        ["--events", "-"],
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


def test_a_name_that_is_no_text_is_shown_the_same_everywhere(client: Client, tmp_path: Path) -> None:
    name = os.fsdecode(bytes(tmp_path) + b"/caf\xff\nb.wav")
    found = client("send", name, "--url", NOBODY, "--out", tmp_path / "a.wav", "--json")
    assert found.status == 1
    assert found.complaint().startswith(f"{tmp_path}/caf\ufffd\\nb.wav: ")
    assert found.json()["error"] == found.complaint()


# ---- as a process: from its first moment, and where nobody can read

RUN = "from voicechat_client.__main__ import main; main()"
INTERRUPTED = """
import os, signal, sys
class Interrupts:
    def find_spec(name, *rest):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts)
"""


def process(code: str, *words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run([sys.executable, "-c", code, *words], text=True, check=False, timeout=60, **pipes)


@pytest.mark.parametrize("module", ["voicechat_client.cli", "numpy", "rich.console"])
def test_ctrl_c_while_it_is_loaded(module: str) -> None:
    found = process(INTERRUPTED.format(module=module) + RUN, "--help")
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


def test_ctrl_c_is_an_interrupt_once_it_is_loaded() -> None:
    told = "cli.main = lambda: print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert process(f"import signal; from voicechat_client import cli; {told}\n{RUN}").stdout == "True\n"


def test_what_is_loaded_before_it_minds_ctrl_c() -> None:
    code = "import sys; import voicechat_client.__main__; print(*{'trio', 'numpy', 'typer', 'rich'} & set(sys.modules))"
    assert process(code).stdout == "\n"


def test_a_ctrl_c_that_is_to_be_ignored_is() -> None:
    """As by nohup, and in the background of a script."""
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + INTERRUPTED.format(module="trio") + RUN
    assert process(code, "ping", "--help").returncode == 0


@pytest.mark.parametrize("words", [["--help"], ["send", "--help"]])
def test_help_that_cannot_be_written(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        found = process(RUN, *words, stdout=full)
        assert (found.returncode, found.stderr) == (
            1,
            "voicechat-client: stdout cannot be written: No space left on device\n",
        )


def test_a_status_where_nothing_can_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        assert process(RUN, "ping", "--url", NOBODY, stdout=full, stderr=full).returncode == 3


def test_help_lists_every_status(client: Client) -> None:
    found = client("--help")
    assert found.status == 0
    assert "Exit status: 0 all is well" in found.out
    for word in ("no connection", "TLS", "key", "no voicechat server", "busy", "refused", "lost", "130 for Ctrl-C"):
        assert word in found.out
    assert "voicechat-client send question.wav --check CHECKPOINT" in found.out


@pytest.mark.parametrize(
    ("command", "example"),
    [("send", "voicechat-client send question.wav --check CHECKPOINT"), ("talk", "talk --half-duplex"), ("ping", "")],
)
def test_the_help_of_a_command_is_about_it(client: Client, command: str, example: str) -> None:
    """And says where the list of statuses is."""
    found = client(command, "--help")
    assert (found.status, found.err) == (0, "")
    assert "Exit status: 0 all is well; voicechat-client --help lists the others." in found.out
    assert example in found.out
    assert "130 for Ctrl-C" not in found.out
    others = {"send", "talk"} - {command}
    assert not any(f"voicechat-client {other}" in found.out for other in others)


# ---- what the system does not give


@pytest.mark.parametrize("check", [False, True])
def test_without_a_temporary_folder(
    check: bool, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a check needs one."""

    def none() -> NoReturn:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    words = ["--check", "somewhere"] if check else []
    found = client("send", SPOKEN, "--url", NOBODY, "--out", tmp_path / "a.wav", *words)
    said = "--check needs a temporary folder: No usable temporary directory found in ['/tmp']"
    assert (found.status, found.complaint().startswith(said)) == ((1, True) if check else (3, False))


def test_what_the_system_refuses_is_not_about_stdout(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> NoReturn:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(trio, "run", refused)
    found = client("ping", "--url", NOBODY)
    assert (found.status, found.complaint()) == (1, "[Errno 24] Too many open files")


# ---- what is said of an option names it


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--skip-beyond", "0"], "--skip-beyond is 0; 0.08 seconds, a frame, or more are needed"),
        (["--skip-beyond", "inf"], "--skip-beyond is inf; 0.08 seconds, a frame, or more are needed"),
        (["--silent-seconds", "0"], "--silent-seconds is 0; more than 0 is needed"),
        (["--prompt", os.fsdecode(b"a\xff")], "--prompt is no text: UTF-8 is needed"),
        (
            ["--ca-file", "/nowhere"],
            "ws://127.0.0.1:1/v1/realtime speaks no TLS, so the certificates in /nowhere are of",
        ),
    ],
)
def test_what_is_said_of_an_option(words: list[str], said: str, client: Client, tmp_path: Path) -> None:
    found = client("send", SPOKEN, "--url", NOBODY, "--out", tmp_path / "a.wav", *words)
    assert found.status == 2
    assert found.complaint().startswith(said)


def test_what_the_core_says_has_one_name_before_it(client: Client, tmp_path: Path) -> None:
    found = client("send", SPOKEN, "--url", NOBODY, "--out", tmp_path / "a.wav", "--check", tmp_path / "none")
    first, said = found.complaint().split(": ", 1)
    assert first == "voicechat inspect failed with 1"
    # Where there is no MLX, that is what it says.
    assert said.startswith((f"{tmp_path}/none: ", "MLX is not installed: "))
