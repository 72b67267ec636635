"""PortAudio's devices, with a stand-in for the package: how they are opened, called, and what is said of faults."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.client.fake_sounddevice import FakeSoundDevice, PortAudioError, device
from voicechat_client import mic
from voicechat_client.devices import Device, DeviceError, Microphone, Speaker
from voicechat_client.ring import Samples

MACHINE = [device("Built-in Microphone", inputs=1), device("Speakers", outputs=2, rate=44100)]


def install(monkeypatch: pytest.MonkeyPatch, *found: dict[str, Any], **options: Any) -> FakeSoundDevice:
    library = FakeSoundDevice(list(found or MACHINE), **options)
    monkeypatch.setitem(sys.modules, "sounddevice", library)
    return library


def test_the_list_is_portaudios(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert mic.devices() == [
        Device(0, "Built-in Microphone", "Core Audio", 1, 0, 48000, default_input=True),
        Device(1, "Speakers", "Core Audio", 0, 2, 44100, default_output=True),
    ]


def test_a_microphone_is_opened_as_it_is_and_gives_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch)
    taken: list[tuple[Samples, bool]] = []
    with mic.open_microphone() as microphone:
        plays_the_part: Microphone = microphone
        (stream,) = library.opened
        assert {**stream.made_with, "callback": None} == {
            "device": 0, "channels": 1, "samplerate": 48000, "dtype": "float32", "latency": "low", "callback": None,
        }  # fmt: skip
        described = (plays_the_part.name, microphone.rate, microphone.channels, microphone.latency)
        assert described == ("Built-in Microphone", 48000, 1, 0.0125)
        assert stream.done == []
        microphone.start(lambda block, lost: taken.append((block, lost)))
        blocks = [np.full((480, 1), level, np.float32) for level in (0.1, 0.2)]
        stream.call(blocks[0], output_underflow=True)
        stream.call(blocks[1], input_overflow=True)
        microphone.stop()
        microphone.stop()
    assert [(block is given, lost) for (block, lost), given in zip(taken, blocks, strict=True)] == [
        (True, False),
        (True, True),
    ]
    assert stream.done == ["start", "abort", "abort", "abort", "close"]


def test_a_speaker_is_asked_to_be_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch)
    flags = []

    def fill(out: Samples, ran_out: bool) -> None:
        out[:] = 0.5
        flags.append(ran_out)

    with mic.open_speaker("speak", latency=0.05) as speaker:
        plays_the_part: Speaker = speaker
        plays_the_part.start(fill)
        (stream,) = library.opened
        block = np.zeros((441, 2), np.float32)
        stream.call(block, input_overflow=True)
        stream.call(block, output_underflow=True)
    assert block.min() == 0.5
    assert flags == [False, True]
    assert (stream.made_with["samplerate"], stream.made_with["latency"], speaker.channels) == (44100, 0.05, 2)
    assert stream.done == ["start", "abort", "close"]


@pytest.mark.parametrize(
    ("inputs", "accepts", "tried"),
    [(1, None, [1]), (2, None, [2]), (32, None, [2]), (8, [8], [2, 8]), (8, [1], [2, 8, 1]), (2, [1], [2, 1])],
)
def test_channels_are_two_or_all_or_one(
    monkeypatch: pytest.MonkeyPatch, inputs: int, accepts: list[int] | None, tried: list[int]
) -> None:
    library = install(monkeypatch, device("Interface", inputs=inputs, accepts=accepts))
    with mic.open_microphone() as microphone:
        assert microphone.channels == tried[-1]
    assert library.tried == tried


def test_a_device_that_refuses_is_named_with_the_first_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, device("Inter\x07face", inputs=8, accepts=[9]))
    with pytest.raises(DeviceError) as caught, mic.open_microphone():
        pass
    assert str(caught.value) == (
        "Inter�face (0) cannot be opened as a microphone at 48000 Hz: "
        "Error opening stream: Invalid number of channels\\n[PaErrorCode -9998] 2"
    )
    assert library.tried == [2, 8, 1]


def test_a_device_that_does_not_start_is_named_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, start_error=PortAudioError("Internal PortAudio error"))
    with (
        pytest.raises(DeviceError, match="Built-in Microphone cannot be started: Internal PortAudio error"),
        mic.open_microphone() as microphone,
    ):
        microphone.start(lambda block, lost: None)
    assert library.opened[0].done == ["abort", "close"]


def test_devices_that_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, list_error=PortAudioError("Error querying device -1"))
    with pytest.raises(DeviceError, match="the audio devices cannot be listed: Error querying device -1"):
        mic.devices()


def test_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeSoundDevice([], defaults=(-1, -1))
    monkeypatch.setitem(sys.modules, "sounddevice", library)
    assert mic.devices() == []
    with pytest.raises(DeviceError, match="there is no speaker"), mic.open_speaker():
        pass


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)  # as if it were not installed
    with pytest.raises(DeviceError) as caught:
        mic.devices()
    assert str(caught.value) == (
        'microphone and speaker need the package sounddevice: pip install "voicechat-client[mic]"'
    )


def test_without_portaudio_the_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """As sounddevice does where it finds no library: OSError while it is imported."""
    (tmp_path / "sounddevice.py").write_text("raise OSError('PortAudio library not found')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    with pytest.raises(DeviceError, match=r"sudo apt install libportaudio2.*\(PortAudio library not found\)"):
        mic.devices()


def test_importing_everything_imports_neither_sounddevice_nor_mlx() -> None:
    code = (
        "import sys; sys.modules['mlx'] = sys.modules['sounddevice'] = None\n"
        "import voicechat_client.talk, voicechat_client.mic\n"
        "print('soundfile' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
