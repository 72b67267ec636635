"""How far a client gets before it vanishes: every point of a conversation, from silence to the last close frame."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from tests.server.clients import UPGRADE, Client, append, noise, said
from tests.server.frames import CLOSE, close_frame

LONG_PROMPT = "You are asked to be brief, and to say so at length. " * 4


async def nothing_sent(first: Client, chance: random.Random) -> None:
    pass


async def half_a_request(first: Client, chance: random.Random) -> None:
    await first.write(UPGRADE[: chance.randrange(1, len(UPGRADE))])


async def asked(first: Client, chance: random.Random) -> None:
    await first.write(UPGRADE)
    await trio.sleep(chance.choice([0.0, 0.001, 0.003]))


async def upgraded(first: Client, chance: random.Random) -> None:
    await first.upgrade()


async def created(first: Client, chance: random.Random) -> None:
    await first.upgrade()
    assert (await first.hear())["type"] == "session.created"


async def opening(first: Client, chance: random.Random) -> None:
    """A prompt that no session had before is read by the model for a while."""
    await created(first, chance)
    await first.say("session.update", session={"system_prompt": f"{chance.random()} {LONG_PROMPT}"})
    await trio.sleep(chance.choice([0.0, 0.002, 0.005]))


async def inferring(first: Client, chance: random.Random) -> None:
    await first.upgrade()
    await first.open_session(seed=chance.randrange(2**64))
    await first.write(append(noise(4)))
    for _ in range(chance.randrange(1, 4)):
        await first.hear_until("response.audio.delta")


async def flushing(first: Client, chance: random.Random) -> None:
    await inferring(first, chance)
    await first.say("input_audio_buffer.commit")
    await first.hear_until("input_audio_buffer.committed")


async def leaving(first: Client, chance: random.Random) -> None:
    """Its own close frame is on its way."""
    await inferring(first, chance)
    await first.write(close_frame(1000))


async def cancelling(first: Client, chance: random.Random) -> None:
    await inferring(first, chance)
    await first.say("session.cancel")


async def closed_after(first: Client, kind: str) -> None:
    """The server's close frame has come, and is not answered."""
    while (got := await first.next()) != (CLOSE, b"\x03\xe8" + kind.encode()):
        assert got is not None
        assert got[0] != CLOSE


async def cancelled(first: Client, chance: random.Random) -> None:
    await cancelling(first, chance)
    await closed_after(first, "cancelled")


async def done(first: Client, chance: random.Random) -> None:
    await first.upgrade()
    await first.open_session()
    await first.write(append(noise(0.08)) + said("input_audio_buffer.commit"))
    await closed_after(first, "done")


@dataclass(frozen=True)
class Point:
    """``holds`` the slot, or not; None where a peer cannot know."""

    reach: Callable[[Client, random.Random], Awaitable[None]]
    holds: bool | None


POINTS = [
    Point(nothing_sent, False),
    Point(half_a_request, False),
    Point(asked, None),
    Point(upgraded, None),
    Point(created, True),
    Point(opening, True),
    Point(inferring, True),
    Point(flushing, True),
    Point(leaving, None),
    Point(cancelling, None),
    Point(cancelled, False),
    Point(done, False),
]
