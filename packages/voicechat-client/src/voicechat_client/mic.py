"""The machine's own microphones and speakers: PortAudio, through sounddevice, which is imported when it is needed.

Choices:

* A device is opened at its own rate and in at most two of its channels. 16 kHz, or one channel, is refused by many;
  a device that refuses two is asked for all that it has, then for one.
* PortAudio is not asked beforehand whether it would accept: on macOS it says yes to what then ends the process.
* What the callbacks do is written elsewhere; here they pass on the block and one flag.
* Streams are aborted, not stopped: stopping waits for a device that may be gone.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

from voicechat_client.devices import Device, DeviceError, Direction, Fill, Take, choose
from voicechat_client.ring import Samples
from voicechat_core.terminal import printable

__all__ = ["Latency", "devices", "open_microphone", "open_speaker"]

Latency = float | Literal["low", "high"]

NO_SOUNDDEVICE: Final = 'microphone and speaker need the package sounddevice: pip install "voicechat-client[mic]"'
NO_PORTAUDIO: Final = (
    "the library PortAudio was not found; on Debian and Ubuntu: sudo apt install libportaudio2, "
    "on Fedora: sudo dnf install portaudio"
)


def devices() -> list[Device]:
    """What this machine has, as PortAudio numbers it; empty if it has nothing.

    Raises:
        DeviceError: if sounddevice or PortAudio is not installed, or PortAudio cannot say.
    """
    library = _library()
    with _about("the audio devices cannot be listed", library):
        hosts = [host["name"] for host in library.query_hostapis()]
        microphone, speaker = library.default.device
        return [
            Device(
                index=found["index"], name=found["name"], host=hosts[found["hostapi"]],
                inputs=found["max_input_channels"], outputs=found["max_output_channels"],
                rate=found["default_samplerate"],
                default_input=found["index"] == microphone, default_output=found["index"] == speaker,
            )
            for found in library.query_devices()
        ]  # fmt: skip


@contextmanager
def open_microphone(wanted: int | str | None = None, latency: Latency = "low") -> Iterator["PortAudioMicrophone"]:
    """The microphone of that number, or with that text in its name; the system's own choice for None.

    Raises:
        DeviceError: naming the device and what PortAudio says.
    """
    with _opened(choose(devices(), wanted, "input"), "input", latency) as stream:
        yield PortAudioMicrophone(stream)


@contextmanager
def open_speaker(wanted: int | str | None = None, latency: Latency = "low") -> Iterator["PortAudioSpeaker"]:
    """The speaker, chosen as a microphone is.

    Raises:
        DeviceError: as for a microphone.
    """
    with _opened(choose(devices(), wanted, "output"), "output", latency) as stream:
        yield PortAudioSpeaker(stream)


def _library() -> Any:
    try:
        return importlib.import_module("sounddevice")
    except ModuleNotFoundError as error:
        raise DeviceError(NO_SOUNDDEVICE) from error
    except OSError as error:  # sounddevice is there, and says so of PortAudio
        raise DeviceError(f"{NO_PORTAUDIO} ({error})") from error


@contextmanager
def _about(what: str, library: Any) -> Iterator[None]:
    try:
        yield
    except (library.PortAudioError, ValueError, OSError) as error:
        raise DeviceError(f"{what}: {printable(str(error))}") from error


class _Stream:
    """A stream of sounddevice that is open; what its callback does is set when it starts."""

    def __init__(self, device: Device, direction: Direction, channels: int, latency: Latency) -> None:
        self.name = printable(device.name)
        self._library = _library()
        self._call: Callable[[Samples, bool], None] = lambda block, lost: None
        kind = self._library.InputStream if direction == "input" else self._library.OutputStream
        self._flag = "input_overflow" if direction == "input" else "output_underflow"
        self.stream = kind(
            device=device.index, channels=channels, samplerate=device.rate, dtype="float32", latency=latency,
            callback=self._called,
        )  # fmt: skip

    def start(self, call: Callable[[Samples, bool], None]) -> None:
        self._call = call
        with _about(f"{self.name} cannot be started", self._library):
            self.stream.start()

    def _called(self, block: Samples, _samples: int, _time: Any, status: Any) -> None:
        self._call(block, bool(getattr(status, self._flag)))


@contextmanager
def _opened(device: Device, direction: Direction, latency: Latency) -> Iterator[_Stream]:
    stream = _open(device, direction, latency)
    try:
        yield stream
    finally:
        stream.stream.abort()
        stream.stream.close()


def _open(device: Device, direction: Direction, latency: Latency) -> _Stream:
    """Open it in two channels, in all, or in one: the first that is accepted. The first refusal is the one to tell."""
    most = device.channels(direction)
    library, refusal = _library(), None
    for channels in dict.fromkeys((min(most, 2), most, 1)):
        try:
            return _Stream(device, direction, channels, latency)
        except (library.PortAudioError, ValueError, OSError) as error:
            refusal = refusal or error
    what = "microphone" if direction == "input" else "speaker"
    about = f"{printable(device.name)} ({device.index}) cannot be opened as a {what} at {device.rate:g} Hz"
    raise DeviceError(f"{about}: {printable(str(refusal))}") from refusal


class _Opened:
    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    @property
    def name(self) -> str:
        """The device's."""
        return self._stream.name

    @property
    def rate(self) -> float:
        """As PortAudio opened it, in hertz."""
        return float(self._stream.stream.samplerate)

    @property
    def channels(self) -> int:
        """As it was opened."""
        return int(self._stream.stream.channels)

    @property
    def latency(self) -> float:
        """As PortAudio tells it, in seconds."""
        return float(self._stream.stream.latency)

    def stop(self) -> None:
        """Call back no more, at once."""
        self._stream.stream.abort()


class PortAudioMicrophone(_Opened):
    """A ``devices.Microphone``."""

    def start(self, take: Take) -> None:
        """Begin. Raises ``DeviceError`` if the device does not."""
        self._stream.start(take)


class PortAudioSpeaker(_Opened):
    """A ``devices.Speaker``."""

    def start(self, fill: Fill) -> None:
        """Begin. Raises ``DeviceError`` if the device does not."""
        self._stream.start(fill)
