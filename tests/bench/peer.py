"""The peer's side: mlx-vlm's Nemotron VoiceChat, called through its public session and never looked into.

One thing is set from outside: it builds two buffers for 131,072 text ids whatever the config says, so a smaller
checkpoint does not load; the default of that argument is made the checkpoint's own number.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.nemotron_voicechat import Model, ModelConfig, tts
from tokenizers import Tokenizer

from tests.bench.counting import counting, one_node_each
from tests.bench.facts import backend_facts, machine_facts
from tests.bench.serving import serve
from tests.bench.subject import STAGES, FrameTime, noise

__all__ = ["Peer", "PeerTokenizer"]


class PeerTokenizer:
    """What the peer asks of a tokenizer, from the checkpoint's own file."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self._tokenizer.get_vocab()
        return vocab


class Peer:
    """A loaded checkpoint and the session that runs on it."""

    def __init__(self, model: Any, tokenizer: PeerTokenizer, *, mute: bool = False) -> None:
        """``mute`` leaves out the transcript, whose waits depend on what is heard."""
        self.sessions = model.create_session(tokenizer)
        self.mute = mute
        self.open("")
        for _ in range(2):  # so that kernels are there: what a process does once is no session's
            self.frame()

    @classmethod
    def load(cls, checkpoint: Path, *, mute: bool = False) -> "Peer":
        """By the peer's own loader."""
        from mlx_vlm.utils import load_model

        set_vocabulary(json.loads((checkpoint / "config.json").read_text())["text_config"]["vocab_size"])
        return cls(load_model(checkpoint), PeerTokenizer(checkpoint), mute=mute)

    @classmethod
    def of_tensors(cls, description: Path, tensors: dict[str, mx.array], packed: tuple[int, int] | None) -> "Peer":
        """Of a checkpoint's tensors, taken out of ``tensors``: what its loader does, but for reading files.

        ``packed`` are bits and group size of the matrices that have scales.
        """
        config = ModelConfig.from_dict(json.loads((description / "config.json").read_text()))
        set_vocabulary(config.text_config.vocab_size)
        model = Model(config)
        weights = model.sanitize(tensors)
        tensors.clear()
        if packed is not None:
            bits, group_size = packed
            nn.quantize(model, group_size, bits, class_predicate=lambda path, _: f"{path}.scales" in weights)
        for value in weights.values():
            mx.eval(value)  # one by one: what a draw needs on its way is much
        model.load_weights(list(weights.items()), strict=True)
        model.eval()
        return cls(model, PeerTokenizer(description))

    def facts(self) -> dict[str, Any]:
        return {"backend": backend_facts(), "machine": machine_facts(), "versions": _versions()}

    def open(self, prompt: str | None, *, staged: bool = False) -> float:
        self._session = None
        self._noise = noise()
        start = time.perf_counter()
        # Its own profile: it waits after each stage anyway, so asking for it costs nothing.
        self._session = self.sessions.create_streaming_session(system_prompt=prompt, profile=staged)
        elapsed = time.perf_counter() - start
        if self.mute:
            self._session._rnnt.step = lambda encoded: None
        return 1000 * elapsed

    def frame(self) -> FrameTime:
        samples = next(self._noise)
        start = time.perf_counter()
        self._session.push_audio(samples)
        elapsed = 1000 * (time.perf_counter() - start)
        timed = self._session.profile.frames
        return FrameTime(elapsed, {stage: getattr(timed[-1], f"{stage}_ms") for stage in STAGES} if timed else {})

    def count(self, frames: int) -> dict[str, Any]:
        with counting() as counted:
            for _ in range(frames):
                self.frame()
        return counted.a_frame(frames)


def set_vocabulary(size: int) -> None:
    """Let the peer's next model have room for so many text ids."""
    tts.CharAwareSubwordEncoder.__init__.__kwdefaults__["vocab_size"] = size


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("mlx-vlm", "mlx-audio")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--count", action="store_true", help="on the CPU, with stand-ins, without a transcript")
    options = parser.parse_args()
    if not options.count:
        serve(lambda: Peer.load(options.checkpoint))
        return
    mx.set_default_device(mx.cpu)
    with one_node_each():
        serve(lambda: Peer.load(options.checkpoint, mute=True))


if __name__ == "__main__":
    main()
