"""A live session's whole state as one value, and as a safetensors file.

The arrays are the networks' states by their path (``duplex.llm.layers.3.keys``) and the samples that no frame has
taken (``pending``); everything else is one JSON object in the file's metadata. Of keys and values it holds those that
are filled, not the room for more. A snapshot fits the model it was taken from, to the build and the precision: the
model's fingerprint is part of it.
"""

import hashlib
import json
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from voicechat_core import live
from voicechat_core.duplex import DuplexState, first_speech
from voicechat_core.errors import InputError
from voicechat_core.live import LiveState
from voicechat_core.model import VoiceChatModel
from voicechat_core.nn import state as states
from voicechat_core.nn.kv_cache import KVCache, roomy, trimmed

__all__ = ["Snapshot"]

FORMAT = 2
KEY, DIGEST = "voicechat_snapshot", "digest"
PENDING = "pending"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Copies: no session shares a buffer with it, so it can be resumed any number of times."""

    arrays: Mapping[str, mx.array]
    facts: Mapping[str, Any]

    @classmethod
    def of(
        cls, model: VoiceChatModel, state: LiveState, pending: npt.NDArray[np.float32], facts: Mapping[str, Any]
    ) -> Self:
        """The state of a session of ``model``, with the samples it has not heard yet and its other facts."""
        essential = _essential(state)
        capacities = [cache.keys.shape[2] for cache in states.parts(KVCache, essential)]
        kept = states.copy(states.replaced(KVCache, trimmed, essential))
        arrays = {**dict(states.arrays(kept)), PENDING: mx.array(pending)}
        mx.eval(arrays)
        own = {"format": FORMAT, "fingerprint": model.fingerprint, "numbers": dict(states.numbers(kept))}
        own["capacities"] = capacities
        return cls(arrays, {**own, **facts})

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.nbytes for x in self.arrays.values())

    def facts_for(self, model: VoiceChatModel) -> Mapping[str, Any]:
        """What the session is to know besides the arrays.

        Raises:
            InputError: if it was taken from another model, another build of it, or in another precision.
        """
        theirs, ours = self.facts.get("fingerprint"), model.fingerprint
        if theirs != ours:
            raise InputError(
                f"the snapshot was taken from a model with fingerprint {theirs}, this one's is {ours}: "
                "checkpoint and precision must be the same"
            )
        return self.facts

    def state_for(self, model: VoiceChatModel) -> tuple[LiveState, npt.NDArray[np.float32]]:
        """A copy of the networks' state, to be consumed, and the samples that no frame has taken.

        Raises:
            InputError: if the state is not one of this model's.
        """
        arrays = dict(self.arrays)
        pending = np.array(arrays.pop(PENDING), dtype=np.float32)
        state = states.filled(_blank(model), arrays, self.facts["numbers"])
        capacities = iter(self.facts["capacities"])
        return states.copy(states.replaced(KVCache, lambda cache: roomy(cache, next(capacities)), state)), pending

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as safetensors; the file appears whole or not at all.

        Raises:
            InputError: naming the file, when it cannot be written.
        """
        target = Path(path)
        draft = target.with_name(f".{uuid.uuid4().hex}.safetensors")  # MLX adds the suffix otherwise
        facts = json.dumps(dict(self.facts))
        try:
            mx.save_safetensors(str(draft), dict(self.arrays), {KEY: facts, DIGEST: _digest(self.arrays, facts)})
            draft.replace(target)
        except (OSError, RuntimeError) as error:
            raise InputError(f"{target}: the snapshot cannot be written: {error}") from error
        finally:
            with suppress(OSError):
                draft.unlink()

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read what ``save`` wrote.

        Raises:
            InputError: naming the file: it is not there, not whole, not a snapshot, or not as it was written.
        """
        try:
            found: Any = mx.load(str(path), return_metadata=True, format="safetensors")
            arrays, text, digest = found[0], found[1][KEY], found[1][DIGEST]
            mx.eval(arrays)  # the file may be gone, or another, when they are needed
            facts = json.loads(text)
        except (OSError, RuntimeError, ValueError, KeyError, RecursionError) as error:
            raise InputError(f"{path}: cannot be read as a snapshot: {error}") from error
        # A state that is off by one number could be anything to the networks, even an index out of all bounds.
        if digest != _digest(arrays, text):
            raise InputError(f"{path}: not as it was written: the digest of its contents is another")
        if facts["format"] != FORMAT:
            raise InputError(f"{path}: a snapshot of format {facts['format']!r}; this version reads {FORMAT}")
        return cls(arrays, facts)


def _digest(arrays: Mapping[str, mx.array], facts: str) -> str:
    """Of every name, format, shape and byte."""
    digest = hashlib.blake2b(facts.encode(), digest_size=16)
    for name, x in sorted(arrays.items()):
        digest.update(f"{name} {x.shape} {x.dtype}".encode())
        digest.update(np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x).tobytes())
    return digest.hexdigest()


def _essential(state: LiveState) -> LiveState:
    """Without what follows from the rest: the transcript branch's last prediction."""
    rnnt = type(state.rnnt)(state.rnnt.label, state.rnnt.h, state.rnnt.c)
    return LiveState(state.perception, rnnt, state.duplex, state.codec)


def _blank(model: VoiceChatModel) -> LiveState:
    """A state of the same structure, for its paths and kinds."""
    pad = mx.zeros((1, 1), mx.int32)
    speech = first_speech(model, model.networks.tts_model.tts_model.new_state())
    llm = model.networks.stt_model.llm.new_state(1)
    return live.start(model, DuplexState(llm, speech, pad, pad, 0, 0))
