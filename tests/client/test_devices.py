"""Which device is meant, and the list a person chooses from."""

import pytest

from voicechat_client.devices import Device, DeviceError, Direction, choose, listing

MACHINE = [
    Device(0, "MacBook Pro Microphone", "Core Audio", 1, 0, 48000, default_input=True),
    Device(1, "MacBook Pro Speakers", "Core Audio", 0, 2, 48000, default_output=True),
    Device(2, "Scarlett 2i2 USB", "Core Audio", 2, 2, 44100),
    Device(3, "Scarlett 2i2 USB Pro", "Core Audio", 2, 2, 44100),
    Device(4, "Größe\x1b[31m", "Core Audio", 1, 1, 16000),
]


@pytest.mark.parametrize(
    ("wanted", "direction", "index"),
    [
        (None, "input", 0),
        (None, "output", 1),
        (2, "input", 2),
        ("3", "output", 3),
        ("macbook", "input", 0),
        ("MACBOOK", "output", 1),
        ("scarlett 2i2 usb", "input", 2),  # exactly one has just this name
        ("usb pro", "output", 3),
        ("GRÖSSE", "input", 4),
    ],
)
def test_a_device_is_chosen_by_number_or_name(wanted: int | str | None, direction: Direction, index: int) -> None:
    assert choose(MACHINE, wanted, direction).index == index


@pytest.mark.parametrize(
    ("wanted", "direction", "message"),
    [
        (1, "input", "no microphone matches 1; there are: 0 MacBook Pro Microphone; 2 Scarlett 2i2 USB; 3 "),
        (9, "output", "no speaker matches 9; there are: 1 MacBook Pro Speakers; 2 "),
        ("nothing", "input", "no microphone matches 'nothing'; there are: 0 "),
        (
            "scarlett",
            "input",
            "more than one microphone matches 'scarlett': 2 Scarlett 2i2 USB; 3 Scarlett 2i",
        ),
        ("", "output", "more than one speaker matches ''"),
    ],
)
def test_what_is_not_one_device_is_refused_with_what_there_is(
    wanted: int | str, direction: Direction, message: str
) -> None:
    with pytest.raises(DeviceError) as caught:
        choose(MACHINE, wanted, direction)
    assert str(caught.value).startswith(message)
    assert str(caught.value).isprintable()


def test_a_machine_without_a_microphone_or_without_a_choice() -> None:
    with pytest.raises(DeviceError, match="none of this machine's 0 audio devices has an input"):
        choose([], None, "input")
    with pytest.raises(DeviceError, match="there is no microphone: none of this machine's 1 audio devices has"):
        choose(MACHINE[1:2], "MacBook", "input")
    with pytest.raises(DeviceError, match="the system has no speaker of its choice; choose one: 2 Scarlett 2i2 USB;"):
        choose(MACHINE[2:], None, "output")


def test_the_list() -> None:
    lines = listing(MACHINE).splitlines()
    assert lines[0] == ">   0  MacBook Pro Microphone (Core Audio, 1 in, 0 out, 48000 Hz)"
    assert lines[1] == " <  1  MacBook Pro Speakers (Core Audio, 0 in, 2 out, 48000 Hz)"
    assert lines[3] == "    3  Scarlett 2i2 USB Pro (Core Audio, 2 in, 2 out, 44100 Hz)"
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)
    assert listing([]) == ""
