"""What a server process holds, as it says itself and as the system says: counted, sampled, compared."""

from dataclasses import astuple, dataclass, fields

import psutil
import trio

from tests.server.server_process import ServerProcess

__all__ = ["HEAD", "MEMORY_ALLOWANCE", "SETTLE_SECONDS", "Held", "held_by", "not_given_back", "row", "settled"]

# Megabytes that the process may have grown by between the end of the first round and the end. MLX keeps the buffers of
# sessions of all lengths to use them again, and the C library what was allocated between others: 22 MB more after 500
# turns than after 60, and then no more (2026-11-30, Linux). A session's state is 3 to 30 MB, its queued audio up to
# 4 MB: ten sessions that are kept, of thousands, are more than is allowed.
MEMORY_ALLOWANCE = 48.0
SETTLE_SECONDS = 30.0  # close frames are waited for 4 s, a request's header 10 s, an idle thread of Trio's lives 10 s


@dataclass(frozen=True)
class Held:
    """At one moment. All but memory (megabytes) are counts."""

    slots: int
    sessions: int  # of the model's thread
    connections: int  # the one that asks included
    tasks: int
    threads: int
    files: int
    memory: float


GAUGES = {
    "slots": "voicechat_slots_taken",
    "sessions": "voicechat_model_sessions",
    "connections": "voicechat_connections",
    "tasks": "voicechat_tasks",
}


def held_by(server: ServerProcess) -> Held:
    """What it holds now."""
    metrics = server.metrics()
    process = psutil.Process(server.process.pid)
    return Held(
        **{name: int(metrics[gauge]) for name, gauge in GAUGES.items()},
        threads=process.num_threads(),
        files=process.num_fds(),
        memory=process.memory_info().rss / 1e6,
    )


def not_given_back(began: Held, warm: Held, end: Held) -> str | None:
    """The first thing that there is more of at the end: counts than when it ``began``, memory than when warm."""
    for each in fields(Held):
        before, after = getattr(began, each.name), getattr(end, each.name)
        if each.name != "memory" and after > before:
            return f"{each.name}: {before} when it began, {after} at the end"
    if end.memory > warm.memory + MEMORY_ALLOWANCE:
        return (
            f"memory: {warm.memory:.1f} MB when warm, {end.memory:.1f} MB at the end; {MEMORY_ALLOWANCE:g} MB may come"
        )
    return None


async def settled(server: ServerProcess, began: Held, seconds: float = SETTLE_SECONDS) -> Held:
    """What it holds once it has let go of everything, or when it has had the time to."""
    deadline = trio.current_time() + seconds
    while True:
        held = held_by(server)
        if not_given_back(began, held, held) is None or trio.current_time() > deadline:
            return held
        await trio.sleep(0.2)


def row(name: str, held: Held) -> str:
    """A line of the table."""
    *counts, memory = astuple(held)
    return f"{name:<12}" + "".join(f"{count:>12}" for count in counts) + f"{memory:>12.1f}"


HEAD = f"{'':<12}" + "".join(f"{each.name:>12}" for each in fields(Held))
