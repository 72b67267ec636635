"""What a real session says, as a peer reads it."""

import numpy as np
import pytest

from voicechat_core import AudioFrame, VoiceChat, wire
from voicechat_core.audio import float_to_pcm16
from voicechat_server.telling import Telling


@pytest.mark.parametrize("prompt", ["", "Be concise."])
def test_a_session_reaches_its_peer(tiny: VoiceChat, prompt: str) -> None:
    session = tiny.session(system_prompt=prompt, seed=3)
    noise = (np.random.default_rng(0).standard_normal(12_000) * 6000).astype(np.int16)
    said = [*session.push(noise), *session.flush(tail=True)]
    telling = Telling(lambda: "event_0")
    heard = [wire.decode_server(wire.encode(message)) for event in said for message in telling.tell(event)]

    frames = [event for event in said if isinstance(event, AudioFrame)]
    audio = [message for message in heard if isinstance(message, wire.ResponseAudioDelta)]
    assert [message.frame_index for message in audio] == list(range(10))
    for frame, message in zip(frames, audio, strict=True):
        assert np.array_equal(wire.samples_of(message.delta), float_to_pcm16(frame.samples))
        assert message.audio_codes == tuple(frame.codes)
        assert (message.text_token, message.function_token) == (frame.text_token, frame.function_token)

    texts = [message for message in heard if isinstance(message, wire.ResponseTextDelta)]
    assert len(texts) > 2
    assert "".join(message.delta for message in texts) == texts[-1].text == session.text
    assert all(message.token_id == frames[message.frame_index].text_token for message in texts)
    called = [message for message in heard if isinstance(message, wire.ResponseFunctionDelta)]
    assert "".join(message.delta for message in called) == session.function_text
    assert all(message.token_id == frames[message.frame_index].function_token for message in called)
    words = [message for message in heard if isinstance(message, wire.ConversationItemInputAudioTranscriptionDelta)]
    assert "".join(message.delta for message in words) == session.transcript
    assert heard[-1] == wire.ResponseDone(event_id="event_0", frame_index=10)
    assert len(heard) == len(said) - 1  # all but the tail
