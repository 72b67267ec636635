"""What ``mic`` uses of the package sounddevice, with devices that a test describes. Nothing of it is PortAudio."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np


class PortAudioError(Exception):
    pass


def device(
    name: str, inputs: int = 0, outputs: int = 0, rate: float = 48000, accepts: Sequence[int] | None = None
) -> dict[str, Any]:
    """``accepts``: numbers of channels it can be opened with; None for any that it has."""
    return {
        "name": name, "hostapi": 0, "max_input_channels": inputs, "max_output_channels": outputs,
        "default_samplerate": rate, "accepts": accepts,
    }  # fmt: skip


@dataclass
class Stream:
    """One that was opened, with what was done to it."""

    made_with: dict[str, Any]
    samplerate: float
    channels: int
    latency: float = 0.0125
    done: list[str] = field(default_factory=list)
    start_error: Exception | None = None

    def start(self) -> None:
        if self.start_error:
            raise self.start_error
        self.done.append("start")

    def stop(self) -> None:
        raise AssertionError("stop waits for the device")

    def abort(self) -> None:
        assert self.done[-1:] != ["close"]
        self.done.append("abort")

    def close(self) -> None:
        self.done.append("close")

    def call(self, block: np.ndarray, **flags: bool) -> None:
        """As PortAudio does, from its thread."""
        known = dict.fromkeys(("input_overflow", "input_underflow", "output_overflow", "output_underflow"), False)
        self.made_with["callback"](block, len(block), None, SimpleNamespace(**known | flags))


@dataclass
class FakeSoundDevice:
    """The module. ``opened``: its streams, in order. ``tried``: channels, those refused too."""

    found: list[dict[str, Any]]
    defaults: tuple[int, int] = (0, 1)
    start_error: Exception | None = None
    list_error: Exception | None = None
    opened: list[Stream] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    PortAudioError: type[Exception] = PortAudioError

    def __post_init__(self) -> None:
        self.default = SimpleNamespace(device=self.defaults)
        self.InputStream: Callable[..., Stream] = lambda **options: self._open("max_input_channels", options)
        self.OutputStream: Callable[..., Stream] = lambda **options: self._open("max_output_channels", options)

    def query_devices(self) -> list[dict[str, Any]]:
        if self.list_error:
            raise self.list_error
        return [entry | {"index": index} for index, entry in enumerate(self.found)]

    def query_hostapis(self) -> tuple[dict[str, Any], ...]:
        return ({"name": "Core Audio"},)

    def check_input_settings(self, **_options: Any) -> None:
        raise AssertionError("it must not be trusted")

    def _open(self, key: str, options: dict[str, Any]) -> Stream:
        entry, channels = self.found[options["device"]], options["channels"]
        self.tried.append(channels)
        accepts = entry["accepts"] or range(1, entry[key] + 1)
        if channels not in accepts:
            raise PortAudioError(f"Error opening stream: Invalid number of channels\n[PaErrorCode -9998] {channels}")
        if options["samplerate"] != entry["default_samplerate"]:
            raise PortAudioError("Error opening stream: Invalid sample rate [PaErrorCode -9997]")
        self.opened.append(Stream(options, options["samplerate"], channels, start_error=self.start_error))
        return self.opened[-1]
