"""What a microphone and a speaker are to a conversation, and how one of several is chosen and listed.

Nothing here knows PortAudio; ``mic`` has the real ones, and tests have devices whose clocks run as they say.

A device has the rate and the channels that it likes. It calls back from a thread of its own, at any time between
``start`` and ``stop``, and must not be kept waiting there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from voicechat_client.errors import DeviceError
from voicechat_client.ring import Samples
from voicechat_core.terminal import printable

__all__ = ["Device", "DeviceError", "Direction", "Fill", "Microphone", "Speaker", "Take", "choose", "listing"]

Direction = Literal["input", "output"]

# Samples [S, C] from the microphone, and whether some were lost before them. The array is the device's: copy it.
Take = Callable[[Samples, bool], None]
# Samples [S, C] for the speaker, all to be written, and whether the device ran out of them before.
Fill = Callable[[Samples, bool], None]


class _Described(Protocol):
    @property
    def name(self) -> str:
        """As a person knows it, printable."""

    @property
    def rate(self) -> float:
        """Samples of a channel in a second, by the device's own clock."""

    @property
    def channels(self) -> int:
        """Of the blocks that it gives or wants."""

    @property
    def latency(self) -> float:
        """Seconds between the air and the callback."""

    def stop(self) -> None:
        """Call back no more, at once. A second time, or before ``start``: nothing."""


class Microphone(_Described, Protocol):
    """Gives blocks of samples."""

    def start(self, take: Take) -> None:
        """Call ``take`` for each block from now on.

        Raises:
            DeviceError: if the device cannot be started.
        """


class Speaker(_Described, Protocol):
    """Asks for blocks of samples."""

    def start(self, fill: Fill) -> None:
        """Call ``fill`` for each block from now on.

        Raises:
            DeviceError: if the device cannot be started.
        """


@dataclass(frozen=True)
class Device:
    """One line of the list. ``inputs`` and ``outputs`` are channels, 0 for none; ``rate`` is its own, in hertz."""

    index: int
    name: str
    host: str
    inputs: int
    outputs: int
    rate: float
    default_input: bool = False
    default_output: bool = False

    def channels(self, direction: Direction) -> int:
        """Of that direction."""
        return self.inputs if direction == "input" else self.outputs

    def is_default(self, direction: Direction) -> bool:
        """Whether it is the system's own choice for that direction."""
        return self.default_input if direction == "input" else self.default_output


def choose(devices: Sequence[Device], wanted: int | str | None, direction: Direction) -> Device:
    """The device of that number, or the only one with that text in its name; the system's own choice for None.

    Raises:
        DeviceError: saying what there is, if there is no such device or more than one.
    """
    what = "microphone" if direction == "input" else "speaker"
    usable = [device for device in devices if device.channels(direction)]
    if not usable:
        raise DeviceError(f"there is no {what}: none of this machine's {len(devices)} audio devices has an {direction}")
    found = _matching(usable, wanted, direction)
    if len(found) == 1:
        return found[0]
    there = "; ".join(f"{device.index} {printable(device.name)}" for device in found or usable)
    if wanted is None:
        raise DeviceError(f"the system has no {what} of its choice; choose one: {there}")
    if found:
        raise DeviceError(f"more than one {what} matches {wanted!r}: {there}")
    raise DeviceError(f"no {what} matches {wanted!r}; there are: {there}")


def _matching(usable: list[Device], wanted: int | str | None, direction: Direction) -> list[Device]:
    if wanted is None:
        return [device for device in usable if device.is_default(direction)]
    if isinstance(wanted, int) or wanted.isdecimal():
        return [device for device in usable if device.index == int(wanted)]
    text = wanted.casefold()
    exact = [device for device in usable if device.name.casefold() == text]
    return exact or [device for device in usable if text in device.name.casefold()]


def listing(devices: Sequence[Device]) -> str:
    """A line for each device: its number, ``>`` for the default microphone, ``<`` for the default speaker, its name.

    Empty if there are none.
    """
    return "\n".join(_line(device) for device in devices)


def _line(device: Device) -> str:
    marks = (">" if device.default_input else " ") + ("<" if device.default_output else " ")
    about = f"{printable(device.host)}, {device.inputs} in, {device.outputs} out, {device.rate:g} Hz"
    return f"{marks}{device.index:3}  {printable(device.name)} ({about})"
