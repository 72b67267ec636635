"""The ``voicechat-client`` command, from its first moment: a Ctrl-C while the rest is loaded ends it without a word.

``python -m voicechat_client`` is the same.
"""

import os
import signal
from types import FrameType
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Load the command and run it; see ``cli.main``."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where whoever started us has it ignored
        signal.signal(signal.SIGINT, _leave)
    from voicechat_client.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """At once: an exception could come out of any import, as another one, and nothing is open yet."""
    os._exit(128 + number)


if __name__ == "__main__":
    main()
