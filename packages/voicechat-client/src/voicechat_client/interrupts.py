"""Ctrl-C, SIGTERM and SIGHUP, so that whatever is open is finished first."""

import signal
import sys
from collections.abc import Awaitable, Callable

import trio

__all__ = ["InterruptedBySignal", "stopping_signals", "until_interrupted"]


class InterruptedBySignal(Exception):  # noqa: N818 (to be asked to stop is no error)
    """A signal came. ``number`` is which."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def stopping_signals() -> tuple[signal.Signals, ...]:
    """Those that ask this process to stop; SIGHUP, the end of its terminal, not where ``nohup`` has it ignored."""
    if sys.platform == "win32" or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP


async def until_interrupted(work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work``, and cancel it at the first signal; what it holds open it closes as it ends. A second one kills.

    Raises:
        InterruptedBySignal: when one came.
        Exception: what ``work`` raises, as it is.
    """
    number: int | None = None
    failure: Exception | None = None

    async def obey(task_status: trio.TaskStatus[None]) -> None:
        nonlocal number
        with trio.open_signal_receiver(*stopping_signals()) as signals:
            task_status.started()
            async for signal_number in signals:
                number = signal_number
                break
        nursery.cancel_scope.cancel()  # from here on signals do what they always do

    async with trio.open_nursery() as nursery:
        await nursery.start(obey)
        try:
            await work()
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if number is not None:
        raise InterruptedBySignal(number)
