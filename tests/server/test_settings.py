"""Limits: each a number above 0, each an option that reaches the place where it is kept."""

import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from voicechat_core.errors import InputError
from voicechat_server import cli
from voicechat_server.app import App
from voicechat_server.http import HttpLimits
from voicechat_server.protocol import Limits
from voicechat_server.running import Place
from voicechat_server.settings import Settings
from voicechat_server.transport import SocketLimits
from voicechat_server.worker import Worker


@pytest.mark.parametrize(
    "wrong",
    [
        {"write_seconds": 0},
        {"connections": -1},
        {"queued_seconds": math.nan},
        {"queued_seconds": math.inf},
        {"limits": Limits(idle_seconds=-0.5)},
        {"http_limits": HttpLimits(header_bytes=0)},
        {"socket_limits": SocketLimits(message_chars=0)},
    ],
)
def test_limits_that_cannot_be_meant(wrong: dict[str, Any]) -> None:
    name, value = next(iter(wrong.items()))
    named = {
        "limits": "idle_seconds is -0.5",
        "http_limits": "header_bytes is 0",
        "socket_limits": "message_chars is 0",
    }
    with pytest.raises(InputError, match=named.get(name, f"{name} is {value}")):
        Settings(model="x", **wrong)


def test_time_may_be_endless() -> None:
    Settings(model="x", write_seconds=math.inf, limits=Limits(math.inf, math.inf, math.inf))


@pytest.mark.parametrize(
    ("seconds", "frames"), [(10, 125), (0.001, 1), (0.08, 1), (0.081, 2), (math.inf, 12_500_000_000)]
)
def test_how_many_frames_a_call_waits(seconds: float, frames: int) -> None:
    assert Settings(model="x", tool_seconds=seconds).tool_wait_frames == frames


def test_every_limit_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Worker, App, Place]] = []
    monkeypatch.setattr(cli, "run", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(cli, "_loader", lambda checkpoint, precision, compile: (checkpoint, precision))
    monkeypatch.setattr(cli, "_checkpoint", lambda model: (model, Path("there")))
    options = {
        "session-seconds": 1, "configure-seconds": 2, "idle-seconds": "inf", "queued-seconds": 4, "queued-events": 5,
        "write-seconds": 6, "prompt-chars": 7, "message-chars": 8000, "header-bytes": 9000, "header-seconds": 10,
        "connections": 11, "tool-seconds": 3, "output-chars": 14,
        "model": "m", "system-prompt": "p", "tts-context-frames": 12, "host": "::1", "port": 13,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    [(worker, app, place)] = seen
    assert app._settings == Settings(
        model="m",
        system_prompt="p",
        tts_context_frames=12,
        limits=Limits(configure_seconds=2, idle_seconds=math.inf, session_seconds=1, prompt_chars=7, output_chars=14),
        tool_seconds=3,
        http_limits=HttpLimits(header_bytes=9000, header_seconds=10),
        socket_limits=SocketLimits(message_chars=8000),
        write_seconds=6,
        connections=11,
        queued_seconds=4,
        queued_events=5,
    )
    assert (worker._most_input, worker._most_results) == (64000, 5)
    assert (worker._side._warm_prompt, worker._side._warm_context_frames, place) == ("p", 12, Place("::1", 13))


def test_the_options_defaults_are_the_settings() -> None:
    """They stand in two places, and must not differ."""
    seen: list[tuple[Worker, App, Place]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "run", lambda *arguments: seen.append(arguments))
        patch.setattr(cli, "_loader", lambda checkpoint, precision, compile: (checkpoint, precision))
        patch.setattr(cli, "_checkpoint", lambda model: (model, Path("there")))
        assert CliRunner().invoke(cli.app, ["-m", "m"]).exit_code == 0
    [(worker, app, place)] = seen
    assert app._settings == Settings(model="m")
    assert (worker._most_input, worker._most_results) == (120 * 16000, 256)
    assert place == Place("127.0.0.1", 8080)
