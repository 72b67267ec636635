"""A frame in flight when its client vanishes does not reach the next one, on a real process.

The first client is reset while its frames run, the second comes as soon as it is let in. What it hears is what
``generate`` gives for its own prompt and seed, from the first frame on.
"""

import numpy as np
import pytest

from tests.server.clients import Message, append, calling, noise, said
from tests.server.server_process import ServerProcess
from voicechat_core import VoiceChat
from voicechat_core.offline import GenerationResult

TIMES = 30
QUESTION = noise(0.3, seed=1)
ASKED = [(prompt, seed) for prompt in ("Be kind.", "You are a bird, and sing.", "") for seed in (1, 2)]


@pytest.fixture(scope="module")
def expected(tiny: VoiceChat) -> list[GenerationResult]:
    """What the second clients are to hear; no two the same."""
    answers = [tiny.generate(QUESTION, system_prompt=prompt, seed=seed) for prompt, seed in ASKED]
    assert len({answer.audio_codes.tobytes() for answer in answers}) == len(ASKED)
    return answers


async def vanish_in_flight(server: ServerProcess, frames: int, seed: int) -> None:
    async with calling(server) as client:
        await client.upgrade()
        await client.open_session(system_prompt="I shall not be here for long.", seed=seed)
        await client.write(append(noise(4, seed=seed)))
        for _ in range(frames):
            await client.hear_until("response.audio.delta")
        client.reset()


async def come_next(server: ServerProcess, prompt: str, seed: int) -> list[Message]:
    """Knock until the door is open, so that no moment is lost; then everything is said at once."""
    update = said("session.update", session={"system_prompt": prompt, "seed": seed})
    while True:
        async with calling(server) as client:
            await client.upgrade()
            first = await client.hear()
            if first["type"] == "session.created":
                await client.write(update + append(QUESTION) + said("input_audio_buffer.commit"))
                heard, closed = await client.hear_all()
                assert (closed.code, closed.reason) == (1000, "done")
                return heard
            assert first["error"]["code"] == "server_busy"


@pytest.mark.trio
async def test_the_next_client_hears_nothing_of_it(server: ServerProcess, expected: list[GenerationResult]) -> None:
    for turn in range(TIMES):
        which = turn % len(ASKED)
        await vanish_in_flight(server, frames=1 + turn % 4, seed=100 + turn)
        heard = await come_next(server, *ASKED[which])
        assert heard[0]["type"] == "session.updated"
        audio = [message for message in heard if message["type"] == "response.audio.delta"]
        answer = expected[which]
        assert [message["frame_index"] for message in audio] == list(range(answer.frames))
        assert [message["text_token"] for message in audio] == answer.text_tokens
        assert [message["function_token"] for message in audio] == answer.function_tokens
        assert np.array_equal([message["audio_codes"] for message in audio], answer.audio_codes)
        for kind, text in (
            ("response.text", answer.text),
            ("response.function", answer.function_text),
            ("conversation.item.input_audio_transcription", answer.transcript),
        ):
            assert "".join(m["delta"] for m in heard if m["type"] == f"{kind}.delta") == text
        assert heard[-1]["type"] == "response.done"
    ended = [line["ended_by"] for line in server.sessions()]
    assert ended == ["the peer left", "done"] * TIMES
