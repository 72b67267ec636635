"""Our side of the comparison."""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.bench.facts import backend_facts, machine_facts
from tests.bench.serving import serve
from tests.bench.subject import FrameTime, noise
from voicechat_core import Profiler, VoiceChat, load
from voicechat_core.checkpoint import filled, matched, refuse_faulty
from voicechat_core.compilation import COMPILES, Compile, wanted
from voicechat_core.config import VoiceChatConfig
from voicechat_core.counts import host_waits_per_frame, primitives_per_frame
from voicechat_core.model import VoiceChatModel
from voicechat_core.tokenizer import RnntVocabulary, Tokenizer

__all__ = ["Own"]


class Own:
    """A loaded checkpoint, warmed up as a server's is before its first user."""

    def __init__(self, voicechat: VoiceChat) -> None:
        self.voicechat = voicechat
        voicechat.warm_up()
        self.open("")
        for _ in range(2):
            self.frame()

    @classmethod
    def of_tensors(cls, description: Path, tensors: dict[str, mx.array], compile: Compile) -> "Own":
        """Of a checkpoint's tensors, taken out of ``tensors``."""
        config = VoiceChatConfig.from_file(description / "config.json")
        contents = matched(tensors, config)
        refuse_faulty(description, contents)
        networks = filled(contents, "auto")
        tokenizer = Tokenizer.from_directory(description, config.text_config.vocab_size)
        vocabulary = RnntVocabulary.from_checkpoint(description, config)
        compiled = wanted(compile)
        return cls(VoiceChat(VoiceChatModel.from_networks(config, networks, tokenizer, vocabulary, compiled=compiled)))

    def facts(self) -> dict[str, Any]:
        return {
            "backend": backend_facts(),
            "machine": machine_facts(),
            "fingerprint": self.voicechat.model.fingerprint,
            "compiled": self.voicechat.model.compiled,
        }

    def open(self, prompt: str | None, *, staged: bool = False) -> float:
        self._session = None  # the last one's memory is free for the next
        self._noise = noise()
        profiler = Profiler(wait=mx.eval) if staged else None
        start = time.perf_counter()
        self._session = self.voicechat.session(system_prompt=prompt, profiler=profiler)
        elapsed = time.perf_counter() - start
        self._profiler = profiler
        return 1000 * elapsed

    def frame(self) -> FrameTime:
        samples = next(self._noise)
        start = time.perf_counter()
        for _ in self._session.push(samples):
            pass
        elapsed = 1000 * (time.perf_counter() - start)
        return FrameTime(elapsed, dict(self._profiler.timings[-1].stages_ms) if self._profiler else {})

    def count(self, frames: int) -> dict[str, Any]:
        """As ``voicechat bench`` counts: one steady frame, for each is like the other."""
        silent = mute(self.voicechat)
        waits, nodes = host_waits_per_frame(silent), primitives_per_frame(silent)
        return {"host_waits": waits.frame, "primitives": sum(nodes.values()), "by_name": dict(nodes.most_common())}


def mute(voicechat: VoiceChat) -> VoiceChat:
    """The same without a transcript, whose waits depend on what is heard."""
    return VoiceChat(replace(voicechat.model, rnnt_vocabulary=RnntVocabulary(())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--compile", default="auto", choices=COMPILES)
    parser.add_argument("--count", action="store_true", help="compute on the CPU, where counts are taken")
    options = parser.parse_args()
    if options.count:
        mx.set_default_device(mx.cpu)
    serve(lambda: Own(load(options.checkpoint, compile=options.compile)))


if __name__ == "__main__":
    main()
