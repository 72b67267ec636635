"""What clients do to a server that they do not mean well, or do not know: each is one client, or some, with a chance.

What they are told is not looked at here, the tests do that; they may be refused or cut off. Each ends by itself.
"""

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from tests.server.clients import UPGRADE, Client, Closed, append, calling, noise, said
from tests.server.frames import PING, frame
from tests.server.points import POINTS
from tests.server.server_process import ServerProcess
from tests.server.test_hostile_frames import BAD_FRAMES
from tests.server.test_hostile_http import NO_REQUESTS
from tests.server.test_hostile_messages import (
    NO_MESSAGES,
    UNKNOWN,
    WRONG_APPENDS,
    WRONG_COMMITS,
    WRONG_OUTPUTS,
    WRONG_UPDATES,
)

__all__ = ["CUT_OFF", "FAULTS", "commit"]

Fault = Callable[[ServerProcess, random.Random], Awaitable[None]]

CUT_OFF = (AssertionError, Closed, trio.BrokenResourceError, trio.ClosedResourceError, ConnectionError)
PATIENCE = 5.0  # seconds for which a client without manners waits for anything


async def vanish(server: ServerProcess, chance: random.Random) -> None:
    """Reset at any point of a conversation."""
    async with calling(server) as client:
        await chance.choice(POINTS).reach(client, chance)
        client.reset()


async def in_a_session(client: Client, chance: random.Random) -> None:
    await client.upgrade()
    await client.open_session(seed=chance.randrange(2**64), function_calls=chance.random() < 0.5)
    await client.write(append(noise(chance.uniform(0, 5))))


async def bad_frame(server: ServerProcess, chance: random.Random) -> None:
    async with calling(server) as client:
        await (in_a_session(client, chance) if chance.random() < 0.5 else client.upgrade())
        await client.write(chance.choice(list(BAD_FRAMES.values()))[0])
        await (client.rest() if chance.random() < 0.5 else trio.sleep(0))
        client.reset()


async def bad_messages(server: ServerProcess, chance: random.Random) -> None:
    wrong = NO_MESSAGES + UNKNOWN + WRONG_APPENDS + WRONG_COMMITS + WRONG_OUTPUTS + WRONG_UPDATES
    async with calling(server) as client:
        await (in_a_session(client, chance) if chance.random() < 0.5 else client.upgrade())
        for data, _, _ in chance.choices(wrong, k=chance.randrange(1, 20)):
            await client.write(data)
        await client.say(chance.choice(["session.cancel", "input_audio_buffer.commit"]))
        await client.hear_all()


async def no_request(server: ServerProcess, chance: random.Random) -> None:
    async with calling(server) as client:
        await client.write(chance.choice(list(NO_REQUESTS.values()))[0])
        await (client.rest() if chance.random() < 0.5 else trio.sleep(0))
        client.reset()


async def noise_on_the_line(server: ServerProcess, chance: random.Random) -> None:
    """Random bytes, as a request or as frames."""
    async with calling(server) as client:
        if chance.random() < 0.5:
            await client.upgrade()
        await client.write(chance.randbytes(chance.randrange(1, 5000)))
        if chance.random() < 0.5:
            await client.stream.send_eof()
            await client.rest()
        client.reset()


async def cut_in_the_middle(server: ServerProcess, chance: random.Random) -> None:
    """What would be a conversation, up to some byte."""
    whole = UPGRADE + said("session.update") + append(noise(2)) + said("input_audio_buffer.commit")
    async with calling(server) as client:
        await client.write(whole[: chance.randrange(len(whole))])
        await trio.sleep(chance.choice([0.0, 0.01, 0.1]))
        client.reset()


async def full_queue(server: ServerProcess, chance: random.Random) -> None:
    """More audio than may be queued, from somebody who may be gone by then."""
    async with calling(server) as client:
        await in_a_session(client, chance)
        minute = append(noise(60))
        for _ in range(chance.randrange(1, 4)):
            await client.write(minute)
        await client.hear_until("response.audio.delta")
        if chance.random() < 0.5:
            await client.say("session.cancel")
        client.reset()


async def deaf(server: ServerProcess, chance: random.Random) -> None:
    """It reads nothing, and its socket holds little."""
    async with calling(server, receive_buffer=4096) as client:
        await in_a_session(client, chance)
        await client.write(append(noise(10)) + frame(PING, b"x") * 1000)
        await trio.sleep(chance.uniform(0, 2))
        client.reset()


async def skipping(server: ServerProcess, chance: random.Random) -> None:
    """A session that drops what it cannot keep up with."""
    async with calling(server) as client:
        await client.upgrade()
        await client.open_session(lag={"policy": "skip", "max_seconds": chance.uniform(0.08, 1)})
        await client.write(append(noise(20)) + said("input_audio_buffer.commit"))
        await client.hear_all()


async def second_thoughts(server: ServerProcess, chance: random.Random) -> None:
    """Updates that fail, one that does not, and a long prompt at that."""
    async with calling(server) as client:
        await client.upgrade()
        for data, _, _ in chance.choices(WRONG_UPDATES, k=3):
            await client.write(data)
        prompt = " ".join(str(chance.random()) for _ in range(chance.randrange(12)))
        await client.say("session.update", session={"system_prompt": prompt})
        await client.hear_until("session.updated")
        await client.say("response.cancel")
        await client.hear_all()


async def crowd(server: ServerProcess, chance: random.Random) -> None:
    """Many at once, of whom one may stay."""

    async def come() -> None:
        with suppress(*CUT_OFF):
            async with calling(server) as client:
                await client.upgrade()
                await client.hear()
                client.reset()

    async with trio.open_nursery() as nursery:
        for _ in range(chance.randrange(2, 20)):
            nursery.start_soon(come)


FAULTS: list[Fault] = [
    vanish,
    vanish,  # twice as likely
    bad_frame,
    bad_messages,
    no_request,
    noise_on_the_line,
    cut_in_the_middle,
    full_queue,
    deaf,
    skipping,
    second_thoughts,
    crowd,
]


async def commit(fault: Fault, server: ServerProcess, seed: int) -> None:
    """Do it; whatever the server does about it, but for a failure of our own."""
    with trio.move_on_after(PATIENCE), suppress(*CUT_OFF):
        await fault(server, random.Random(seed))
