"""Every stage of the speech decoder against one file of goldens, as one table of errors."""

import json
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx
import msgspec
import numpy as np

from tests.conftest import Golden
from voicechat_core.nn.char_table import CharTable
from voicechat_core.nn.ear_tts import EarTTS, EarTtsState, PromptInputs
from voicechat_core.nn.sampler import quantize, square_norms
from voicechat_core.noise import RecordedNoise

PREFIX = "tts_model.tts_model."


def char_table(golden: Golden) -> CharTable:
    """The characters of the golden's tokenizer."""
    tokenizer = json.loads((golden.path / "checkpoint" / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = dict(tokenizer["model"]["vocab"]) | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    config = golden.config
    return CharTable.from_vocab(
        vocab,
        vocab_size=config.text_config.vocab_size,
        char_vocab_size=config.tts_config.character_encoder.char_vocab_size,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )


@dataclass
class Case:
    """One stage file: ``tts`` has all quantizers, ``tts_q8`` the same weights with the first eight only."""

    golden: Golden
    stage: str
    tape: dict[str, mx.array] = field(init=False)
    chars: CharTable = field(init=False)

    def __post_init__(self) -> None:
        self.tape = self.golden.stage(self.stage)
        self.chars = char_table(self.golden)

    @property
    def levels(self) -> int:
        """Quantizers of this stage."""
        return self.tape["step_codes"].shape[-1]

    @cached_property
    def silence(self) -> mx.array:
        """The codec's silence codes ``[Q]``."""
        return self.golden.weights["tts_model.codec_silence_tokens"][: self.levels].astype(mx.int32)

    def build(self, **changes: object) -> EarTTS:
        """The golden's network, its config changed where a test wants a wrong one."""
        vocab_size = self.golden.config.text_config.vocab_size
        config = msgspec.structs.replace(self.golden.config.tts_config, **changes)
        full = EarTTS(config, vocab_size)
        self.golden.fill(full, PREFIX)
        if self.levels == config.num_quantizers:
            return full
        module = EarTTS(msgspec.structs.replace(config, num_quantizers=self.levels), vocab_size)
        module.update(full.parameters())
        module.rvq_embs = full.rvq_embs[: self.levels]
        return module

    def noise(self) -> RecordedNoise:
        """The draws of the steps."""
        config = msgspec.structs.replace(self.golden.config.tts_config, num_quantizers=self.levels)
        return RecordedNoise(self.tape["noise_u"], self.tape["noise_z"], config)

    def prompt(self, tts: EarTTS, last_id: int | None = None) -> PromptInputs:
        """The inputs of the golden speaker's voice prompt."""
        config = self.golden.config
        latents = self.golden.weights[f"tts_model.audio_prompt_latents.{config.speaker}"]
        last = config.eos_token_id if last_id is None else last_id
        return tts.prompt_inputs(latents, self.silence, config.pad_token_id, last, self.chars)

    def warm_state(self, tts: EarTTS, last_id: int | None = None) -> EarTtsState:
        """The state after the voice prompt."""
        inputs = self.prompt(tts, last_id)
        return tts.advance(inputs.audio, inputs.condition, tts.new_state())[1]

    def conditions(self, tts: EarTTS, ids: mx.array, mask: mx.array | None = None) -> mx.array:
        """Conditioning vectors of golden ids; no mask means True everywhere."""
        host = np.array(ids)
        return tts.embed_subword(host, np.ones(host.shape, bool) if mask is None else np.array(mask) != 0, self.chars)


def relative(ours: mx.array, theirs: mx.array) -> float:
    """Largest difference over the largest value."""
    assert ours.shape == theirs.shape
    return float(mx.abs(ours - theirs).max() / mx.abs(theirs).max())


def mismatches(ours: mx.array, theirs: mx.array) -> float:
    """Number of integers that differ."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    return float((ours != theirs).sum())


def no_codes(tts: EarTTS) -> mx.array:
    """The previous codes of the first step: no code in any level."""
    return mx.full((1, 1, tts.config.num_quantizers), tts.config.codebook_size, mx.int32)


def text_errors(case: Case, tts: EarTTS) -> dict[str, float]:
    """Conditioning vectors, spelt everywhere and with a mask; and one step whose text mask is False."""
    tape, bos = case.tape, mx.array([[case.golden.config.bos_token_id]])
    nothing = case.conditions(tts, bos, mx.zeros_like(bos))
    masked, _ = tts.advance(tts.embed_codes(no_codes(tts)), nothing, case.warm_state(tts))
    ids, mask = tape["subword_ids"], tape["subword_mask2"]
    return {
        "subword_emb": relative(case.conditions(tts, ids), tape["subword_emb"]),
        "subword_emb_mask2": relative(case.conditions(tts, ids, mask), tape["subword_emb_mask2"]),
        "masked_step_hidden": relative(masked, tape["masked_step_hidden"]),
    }


def prompt_errors(case: Case, tts: EarTTS, last_id: int | None = None) -> dict[str, float]:
    """The voice prompt: embedded codes, fused inputs, hidden states."""
    tape, inputs = case.tape, case.prompt(tts, last_id)
    hidden, _ = tts.advance(inputs.audio, inputs.condition, tts.new_state())
    return {
        "warmup_input_code_embed": relative(tts.embed_codes(tape["init_code"]), tape["warmup_input_code_embed"]),
        "warmup_fused": relative(tts.fuse(inputs.audio, inputs.condition), tape["warmup_fused"]),
        "warmup_hidden": relative(hidden, tape["warmup_hidden"]),
    }


def step_errors(case: Case, tts: EarTTS, steps: int = 30, last_id: int | None = None) -> dict[str, float]:
    """Generation with the golden's previous codes and draws: inputs, hidden states, Gaussians, codes."""
    tape, noise, state = case.tape, case.noise(), case.warm_state(tts, last_id)
    condition = case.conditions(tts, tape["step_ids"])
    fused, hidden, codes, means, log_stds = [], [], [], [], []
    for t in range(steps):
        audio, text = tts.embed_codes(tape["step_prev_codes"][:, t : t + 1]), condition[:, t : t + 1]
        h, state = tts.advance(audio, text, state)
        drawn = tts.draw(h, noise.frame(t, t))
        mx.eval(h, drawn.codes)
        fused.append(tts.fuse(audio, text))
        hidden.append(h)
        codes.append(drawn.codes)
        means.append(mx.stack(drawn.means))
        log_stds.append(mx.stack(drawn.log_stds))
    return {
        "step_fused": relative(mx.concatenate(fused, 1), tape["step_fused"][:, :steps]),
        "step_hidden": relative(mx.concatenate(hidden, 1), tape["step_hidden"][:, :steps]),
        "step_codes": mismatches(mx.concatenate(codes, 1), tape["step_codes"][:, :steps]),
        "mog_mu": relative(mx.stack(means), tape["mog_mu"][:steps]),
        "mog_logs": relative(mx.stack(log_stds), tape["mog_logs"][:steps]),
    }


def head_errors(case: Case, tts: EarTTS) -> dict[str, float]:
    """Codes from a given hidden state, and residual quantization of given vectors."""
    tape, tables = case.tape, tts.rvq_embs
    draws = RecordedNoise(tape["iso_noise_u"], tape["iso_noise_z"], tts.config).frame(0, 0)
    levels, _ = quantize(tape["rvq_z"], tape["rvq_z"] * 0, tables, square_norms(tables), 0, tables.shape[0])
    return {
        "iso_codes": mismatches(tts.sample(tape["iso_hidden"], draws), tape["iso_codes"]),
        "rvq_codes": mismatches(mx.stack(levels, -1).astype(mx.int32), tape["rvq_codes"]),
    }
