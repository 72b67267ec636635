"""Which signals ask the client to stop."""

import signal
import sys
from collections.abc import Iterator

import pytest

from voicechat_client.interrupts import stopping_signals

ALWAYS = (signal.SIGINT, signal.SIGTERM)
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGHUP")


@pytest.fixture
def hang_up() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_the_end_of_the_terminal_stops_it_but_not_where_that_is_to_be_ignored(hang_up: None) -> None:
    """As by nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert stopping_signals() == (*ALWAYS, signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert stopping_signals() == ALWAYS
