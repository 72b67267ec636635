"""What a session holds: the formula against sessions, exactly."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.core.checkpoints import PUBLISHED, write_hollow
from voicechat_core import VoiceChat, load
from voicechat_core.config import VoiceChatConfig
from voicechat_core.memory import Growth, filled_bytes
from voicechat_core.model import Networks
from voicechat_core.session import Session
from voicechat_core.synthetic import preset_config


def after(voicechat: VoiceChat, frames: int, prompt: str = "") -> Session:
    session = voicechat.session(system_prompt=prompt)
    for _ in session.push(np.zeros(frames * 1280, np.float32)):
        pass
    return session


def test_the_formula_by_hand(tiny: VoiceChat) -> None:
    """tiny: one layer of attention in the language model, seven in the speech decoder, which runs its pair of rows."""
    assert tiny.model.networks.tts_model.tts_model.rows == 2
    language, speech = 1 * 2 * (2 * 32) * 4, 7 * 2 * 2 * (4 * 16) * 4
    assert Growth.of(tiny.model) == Growth(language, speech)
    assert Growth.of(tiny.model).a_minute == 750 * (language + speech)


@pytest.mark.parametrize(
    ("name", "language", "speech"), [("mid", 2048, 64512), ("deep", 1024, 28672), ("published", 32768, 516096)]
)
def test_the_sizes_in_the_docs(name: str, language: int, speech: int, tmp_path: Path) -> None:
    """Of networks without weights: shapes are enough."""
    if name == "published":
        write_hollow(tmp_path, PUBLISHED, 0)
        config = VoiceChatConfig.from_file(tmp_path / "config.json")
    else:
        config = preset_config(name)
    model: Any = SimpleNamespace(networks=Networks(config))
    assert Growth.of(model) == Growth(language, speech)


def test_in_bfloat16_it_is_half(tiny: VoiceChat, tiny_path: Path) -> None:
    half, whole = Growth.of(load(tiny_path, precision="bfloat16").model), Growth.of(tiny.model)
    assert (half.language, half.speech) == (whole.language // 2, whole.speech // 2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_each_frame_adds_so_much_and_nothing_else(
    tiny_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first frame to beyond a doubling. Perception's window holds 71 frames, and is no growth."""
    monkeypatch.setattr("voicechat_core.nn.kv_cache.BLOCK", 8)
    voicechat = load(tiny_path, precision=precision)  # type: ignore[arg-type]
    growth = Growth.of(voicechat.model)
    found = {frames: after(voicechat, frames)._live.duplex for frames in (1, 2, 9, 40)}
    sizes = {frames: filled_bytes(duplex) for frames, duplex in found.items()}
    # The speech decoder does not run at position 0.
    assert all(sizes[n] - sizes[1] == (n - 1) * (growth.language + growth.speech) for n in sizes)


def test_what_a_prompt_adds(tiny: VoiceChat) -> None:
    growth, prompt = Growth.of(tiny.model), "Be concise."
    tokens = len(tiny.model.prompt_ids(prompt))
    with_prompt, without = (filled_bytes(after(tiny, 2, text)._live.duplex) for text in (prompt, ""))
    # Without one, frame 0 stands at position 0, where the speech decoder does not run.
    assert with_prompt - without == tokens * growth.language + (tokens - 1 + 1) * growth.speech
    assert tokens > 2


def test_buffers_hold_less_than_twice_what_is_in_them(tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("voicechat_core.nn.kv_cache.BLOCK", 8)
    session = after(VoiceChat(tiny.model), 40)
    filled = filled_bytes(session._live)
    assert filled < session.nbytes < 2 * filled
    assert filled_bytes([None, 3, "text"]) == 0


def test_a_bounded_speech_decoder_stops(tiny: VoiceChat) -> None:
    growth = Growth.of(tiny.model)
    found = []
    for frames in (8, 12):
        session = tiny.session(system_prompt="", tts_context_frames=5)
        for _ in session.push(np.zeros(frames * 1280, np.float32)):
            pass
        found.append(filled_bytes(session._live.duplex))
    assert found[1] - found[0] == 4 * growth.language
