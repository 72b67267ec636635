"""What is compiled where: with MLX's own decision, on machines with a compiler, without one, and with a broken one."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest

from voicechat_core import InputError, VoiceChat, compilation, load
from voicechat_core.compilation import AUTO_ON, check_compile, wanted

RUN = "from voicechat_core.cli import main; main()"
ASK = """
import sys
import mlx.core as mx
from voicechat_core.compilation import wanted
mx.set_default_device(mx.cpu)
print([wanted(word) for word in sys.argv[1].split(",")])
"""
BROKEN = '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no headers\nexit 1\n'
NO_COMPILER = "on a CPU MLX compiles with g++, which is not here (or MLX_DISABLE_COMPILE is)"
SPOKEN = Path(__file__).parents[1] / "data" / "spoken.wav"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX may find its compiler another way")


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """An environment with nothing on its path, and nothing compiled yet."""
    for name in ("bin", "tmp"):
        (tmp_path / name).mkdir()
    return {**os.environ, "PATH": str(tmp_path / "bin"), "TMPDIR": str(tmp_path / "tmp")}


def asked(words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ASK, words], capture_output=True, text=True, env=environment)


def spoil(machine: dict[str, str]) -> None:
    """A compiler that is there and fails."""
    compiler = Path(machine["PATH"], "g++")
    compiler.write_text(BROKEN)
    compiler.chmod(0o755)


def test_a_setting_that_does_not_exist(tiny_path: Path) -> None:
    assert [check_compile(word) for word in ("auto", "on", "off")] == ["auto", "on", "off"]
    with pytest.raises(InputError, match="compile is 'fast'; one of auto, on, off is needed"):
        wanted("fast")
    with pytest.raises(InputError, match="compile is 'fast'"):
        load(tiny_path, compile="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("auto", [True, False])
def test_auto_is_decided_for_each_device(auto: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AUTO_ON, mx.default_device().type, auto)
    monkeypatch.setattr(compilation, "_fault", lambda device: None)
    assert [wanted(word) for word in ("auto", "on", "off")] == [auto, True, False]


def test_a_model_knows_whether_it_is_compiled(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_fault", lambda device: None)
    assert [load(tiny_path, compile=word).model.compiled for word in ("on", "off")] == [True, False]  # type: ignore


@on_linux
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_with_a_compiler(machine: dict[str, str]) -> None:
    found = asked("on,off", {**machine, "PATH": os.environ["PATH"]})
    assert (found.stdout, found.stderr) == ("[True, False]\n", "")
    switched_off = asked("auto", {**machine, "PATH": os.environ["PATH"], "MLX_DISABLE_COMPILE": "1"})
    assert switched_off.stdout == "[False]\n"


@on_linux
def test_without_a_compiler_auto_is_off_and_says_so_once(machine: dict[str, str]) -> None:
    found = asked("off,auto,auto", machine)
    said = f"a frame's steps run uncompiled: {NO_COMPILER}\n" if AUTO_ON[mx.cpu] else ""
    assert (found.stdout, found.stderr) == ("[False, False, False]\n", said)
    refused = asked("on", machine)
    assert refused.stderr.endswith(f"voicechat_core.errors.InputError: compile is 'on', but {NO_COMPILER}\n")


@on_linux
def test_a_compiler_that_fails_is_left_alone(machine: dict[str, str]) -> None:
    spoil(machine)
    found = asked("off,auto", machine)
    said = (
        "a frame's steps run uncompiled: MLX cannot compile on this CPU: [Compile::eval_cpu] "
        if AUTO_ON[mx.cpu]
        else ""
    )
    assert found.stdout == "[False, False]\n"
    assert found.stderr.startswith(said)
    assert found.stderr.count("\n") == bool(said)
    refused = asked("on", machine)
    assert "InputError: compile is 'on', but MLX cannot compile on this CPU: " in refused.stderr


@on_linux
@pytest.mark.parametrize("compiler", ["none", "broken"])
def test_a_recording_is_answered_whatever_the_compiler(
    compiler: str, machine: dict[str, str], tiny_path: Path, tmp_path: Path
) -> None:
    """Also MLX's own activations, which are compiled by themselves."""
    if compiler == "broken":
        spoil(machine)
    words = ["generate", "-m", str(tiny_path), "--audio", str(SPOKEN), "--max-frames", "3", "--stream"]
    words += ["--output-audio", str(tmp_path / "r.wav")]
    for setting in ("off", "auto"):
        command = [sys.executable, "-c", RUN, *words, "--compile", setting]
        result = subprocess.run(command, capture_output=True, text=True, env=machine)
        assert result.returncode == 0, result.stderr
        assert result.stdout.endswith("r.wav: 3 frames, 0.24 s\n")
        assert result.stderr.count("voicechat: warning: a frame's steps run uncompiled: ") == (
            setting == "auto" and AUTO_ON[mx.cpu]
        )
    refused = subprocess.run(
        [sys.executable, "-c", RUN, *words, "--compile", "on"], capture_output=True, text=True, env=machine
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("voicechat: compile is 'on', but ")


def test_the_command_refuses_a_setting_first() -> None:
    for words in (
        ["generate", "-m", "no-such-model", "--audio", "none"],
        ["bench", "-m", "no-such-model"],
        ["verify", "no-such-folder"],
    ):
        result = subprocess.run(
            [sys.executable, "-c", RUN, *words, "--compile", "fast"], capture_output=True, text=True
        )
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == "voicechat: compile is 'fast'; one of auto, on, off is needed\n"


def test_the_tiny_model_of_the_tests(tiny: VoiceChat) -> None:
    """It is as users have it."""
    assert tiny.model.compiled is wanted("auto")


@pytest.mark.parametrize(
    ("compile", "known", "is_terminal", "expected"),
    [("auto", False, True, True), ("off", False, True, False), ("on", True, True, False), ("on", False, False, False)],
)
def test_a_first_time_is_announced_to_people(
    compile: str, known: bool, is_terminal: bool, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(compilation.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(compilation.sys.stderr, "isatty", lambda: is_terminal)
    if known:
        (tmp_path / "mlx" / version("mlx") / "cpu").mkdir(parents=True)
    compilation.say_what_takes_long(compile)
    assert ("once on this machine" in capsys.readouterr().err) == expected
