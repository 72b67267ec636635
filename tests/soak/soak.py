"""Sessions with random faults against a real server process, for as long as is wanted; then it must be as it was.

Turn by turn: some faults at once, drawn from the seed, then ``/ready``, then a conversation without faults, which has
to say what it said the first time. A first round of turns warms up: caches fill, and memory is compared with what is
held after it.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import trio

from tests.server.clients import converse, frames_of, noise
from tests.server.server_process import ServerProcess
from tests.soak.faults import CUT_OFF, FAULTS, commit
from tests.soak.measures import HEAD, SETTLE_SECONDS, held_by, not_given_back, row, settled

__all__ = ["SoakError", "soak"]

QUESTIONS = [(prompt, seed, seconds) for prompt in (None, "", "Be kind.") for seed, seconds in ((1, 0.1), (2, 0.7))]
MOST_AT_ONCE = 4


class SoakError(Exception):
    """What did not come back, or was not as before."""


@dataclass
class Soak:
    """One run against one server."""

    server: ServerProcess
    chance: random.Random
    answers: dict[int, object] = field(default_factory=dict)
    turns: int = 0
    faults: int = 0

    async def turn(self) -> None:
        """Some faults at once, then a clean conversation."""
        self.turns += 1
        async with trio.open_nursery() as nursery:
            for fault in self.chance.choices(FAULTS, k=self.chance.randrange(1, MOST_AT_ONCE + 1)):
                self.faults += 1
                nursery.start_soon(commit, fault, self.server, self.chance.randrange(2**64))
        self._wait_until_ready()
        await self._ask()

    async def warm_up(self, turns: int) -> None:
        """Each fault once, alone; then some turns. Or nothing."""
        for fault in FAULTS if turns else []:
            await commit(fault, self.server, self.chance.randrange(2**64))
            self._wait_until_ready()
        for _ in range(turns):
            await self.turn()

    def _wait_until_ready(self) -> None:
        try:
            self.server.wait_until_ready(seconds=20)
        except (AssertionError, OSError) as error:
            raise SoakError(f"turn {self.turns}: no session would be accepted: {error}") from None

    async def _ask(self) -> None:
        which = self.chance.randrange(len(QUESTIONS))
        prompt, seed, seconds = QUESTIONS[which]
        options = {} if prompt is None else {"system_prompt": prompt}
        try:
            answer = frames_of(await converse(self.server, noise(seconds), seed=seed, **options))
        except (*CUT_OFF, trio.TooSlowError) as error:
            raise SoakError(f"turn {self.turns}: a client without faults was not served: {error!r}") from None
        if answer != self.answers.setdefault(which, answer):
            raise SoakError(f"turn {self.turns}: question {QUESTIONS[which]} has another answer than the first time")


async def soak(
    server: ServerProcess,
    *,
    minutes: float,
    seed: int,
    warm_turns: int,
    settle_seconds: float = SETTLE_SECONDS,
    tell: Callable[[str], None] = print,
) -> None:
    """Torment a server that was just started.

    Raises:
        SoakError: with the first thing that was not as before.
    """
    began = held_by(server)
    run = Soak(server, random.Random(seed))
    tell(f"seed {seed}, {minutes:g} minutes")
    tell(HEAD)
    tell(row("began", began))
    await run.warm_up(warm_turns)
    warm = await settled(server, began, settle_seconds)
    tell(row("warm", warm))
    start = time.monotonic()
    sampled = count(1)
    minute = next(sampled)
    while (now := time.monotonic() - start) < 60 * minutes:
        await run.turn()
        if now >= 60 * minute:
            tell(row(f"minute {minute}", held_by(server)))
            minute = next(sampled)
    end = await settled(server, began, settle_seconds)
    tell(row("end", end))
    tell(f"{run.turns} turns, {run.faults} faults, {int(server.metrics()['voicechat_sessions_total'])} sessions")
    if what := not_given_back(began, warm, end):
        raise SoakError(what)
