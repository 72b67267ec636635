"""EAR-TTS: one text token in, one frame of 31 codec codes out, every 80 ms.

A frame's backbone input is the previous frame's codes fused with the token's conditioning vector. The backbone runs a
guidance pair as a batch of two, [conditional, unconditional]; both rows hear the same codes, and the
second has ``null_emb`` in place of the text. From the pair of hidden states the sampler draws the codes.

The network knows nothing of turns: what the previous codes are after an EOS, the caller decides.
"""

import sys
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from voicechat_core.config import TtsConfig
from voicechat_core.nn.char_encoder import CharAwareSubwordEncoder
from voicechat_core.nn.char_table import CharTable
from voicechat_core.nn.derived import Derived
from voicechat_core.nn.gemma import At, Decoder, RMSNorm
from voicechat_core.nn.kv_cache import KVCache
from voicechat_core.nn.linear import Linear
from voicechat_core.nn.mog_head import MogHead
from voicechat_core.nn.sampler import Draws, depth_sum, passes, quantize, square_norms

__all__ = ["Drawn", "EarTTS", "EarTtsState", "PromptInputs"]

# The fusion divides by this whatever the number of quantizers: NVIDIA's constructor call gives the number of
# quantizers to another parameter, so its default stays, and the weights were trained with it.
AUDIO_DIVISOR = 31


@dataclass
class EarTtsState:
    """Keys and values of every backbone layer; positions count from the first of the voice prompt."""

    caches: list[KVCache]


@dataclass(frozen=True)
class PromptInputs:
    """What the voice prompt feeds the fusion: audio and text branch, each ``[1, P, H]``."""

    audio: mx.array
    condition: mx.array


@dataclass(frozen=True)
class Drawn:
    """One frame's codes ``[1, 1, Q]`` int32, and the Gaussian of each pass: ``[1, 1, L]`` and ``[1, 1, 1]``."""

    codes: mx.array
    means: list[mx.array]
    log_stds: list[mx.array]


class GatedFusion(nn.Module):
    """A learned, channelwise mix of the audio and the text branch (NeMo's GatedProjectedSumRMSNorm)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.audio_proj = Linear(width, width)
        self.text_proj = Linear(width, width)
        self.gate = mx.zeros((width,))
        self.residual_scale = mx.array(0.5)
        self.final_norm = RMSNorm(width)

    def __call__(self, audio: mx.array, text: mx.array) -> mx.array:
        """``[1, n, H]`` and ``[B, n, H]`` -> ``[B, n, H]`` float32."""
        return self.mix(self.audio_branch(audio), self.text_proj(text))

    def mix(self, audio: mx.array, text: mx.array) -> mx.array:
        """Both branches projected, ``[1, n, H]`` and ``[B, n, H]`` -> ``[B, n, H]`` float32."""
        gate = mx.sigmoid(self.gate.astype(mx.float32))
        scale = mx.sigmoid(self.residual_scale.astype(mx.float32))
        mixed = gate * audio + (1 - gate) * text
        return self.final_norm(scale * mixed)

    def audio_branch(self, audio: mx.array) -> mx.array:
        """The sum over levels brought back to the size of one, then projected: ``[1, n, H]`` -> ``[1, n, H]``."""
        project = self.audio_proj
        if project.quantization is not None:
            return project(audio / AUDIO_DIVISOR)
        return mx.addmm(project.bias, audio.astype(project.dtype), project.weight.T, alpha=1 / AUDIO_DIVISOR)


class EarTTS(nn.Module):
    """The speech decoder. Weights only; see ``EarTtsState`` for what a session remembers."""

    def __init__(self, config: TtsConfig, vocab_size: int) -> None:
        super().__init__()
        width, shape = config.hidden_size, (config.num_quantizers, config.codebook_size, config.latent_size)
        self.config = config
        self.bos_emb = mx.zeros((width,))
        self.null_emb = mx.zeros((width,))
        self.embed_code = Linear(config.latent_size, width, bias=False)
        self.rvq_embs = mx.zeros(shape)
        self.audio_prompt_projection_W = mx.zeros((width, width))
        self.embed_subword = CharAwareSubwordEncoder(config.character_encoder, width, vocab_size)
        self.gated_fusion_audio_text = GatedFusion(width)
        self.backbone = Decoder(config)
        self.mog_head = MogHead(config)
        self._tables = Derived(lambda tables: tables.astype(mx.float32))
        self._norms = Derived(square_norms)
        text_proj = self.gated_fusion_audio_text.text_proj
        self._null_text = Derived(lambda null, *_: text_proj(null))
        self._is_conditional = mx.array([[[True]], [[False]]])

    @property
    def rows(self) -> int:
        """Backbone rows of one session: two with guidance, one without."""
        return 2 if self.config.guidance_scale > 0 else 1

    @property
    def shortest_window(self) -> int:
        """Positions that some layer looks back at, the present one counted, and no further."""
        windows = [layer.self_attn.window for layer in self.backbone.layers]
        return min((window for window in windows if window is not None), default=sys.maxsize)

    def new_state(self) -> EarTtsState:
        """Before the voice prompt."""
        return EarTtsState(self.backbone.new_caches(self.rows))

    def subword_table(self, chars: CharTable) -> mx.array:
        """Conditioning vector of every token id, ``[vocab_size + 1, H]``: a step's condition is ``table[id]``."""
        return self.embed_subword.table(chars)

    def embed_codes(self, codes: mx.array) -> mx.array:
        """Codes ``[B, n, Q]`` -> audio branch ``[B, n, H]``; a frame of ids K (no code) gives zero."""
        return self.embed_code(depth_sum(codes, self.rvq_embs))

    def fuse(self, audio: mx.array, condition: mx.array) -> mx.array:
        """Both branches, ``[1, n, H]`` each -> backbone inputs ``[rows, n, H]``.

        The unconditional row's text is the same at every position: it is projected once.
        """
        fusion = self.gated_fusion_audio_text
        text = fusion.text_proj(condition)
        if self.rows == 2:
            null = self._null_text(self.null_emb, *fusion.text_proj.parameters().values())
            text = mx.where(self._is_conditional, text, null)
        return fusion.mix(fusion.audio_branch(audio), text)

    def prompt_inputs(
        self, latents: mx.array, silence_codes: mx.array, pad_id: int, eos_id: int, chars: CharTable
    ) -> PromptInputs:
        """The voice prompt from a stored speaker's latents ``[1, P, H]`` and the codec's silence codes ``[Q]``.

        The text is PAD, spelt at the last but one position only, and EOS at the last. There the audio is silence
        with ``bos_emb`` in place of the last latent, which is not used.
        """
        frames = latents.shape[1]
        ids, spelt = np.full((1, frames), pad_id), np.zeros((1, frames), bool)
        ids[:, -1], spelt[:, -2:] = eos_id, True
        last = self.embed_codes(silence_codes[None, None]) + self.bos_emb
        audio = mx.concatenate([latents[:, :-1].astype(last.dtype), last], axis=1)
        return PromptInputs(audio, self.embed_subword(ids, spelt, chars))

    def warm_up(
        self, latents: mx.array, silence_codes: mx.array, pad_id: int, eos_id: int, chars: CharTable
    ) -> EarTtsState:
        """The state after the voice prompt: a constant of weights and speaker, to be copied for each session.

        Nothing is drawn. The previous codes of the first step are K in every level, and it gets no ``bos_emb``.
        """
        inputs = self.prompt_inputs(latents, silence_codes, pad_id, eos_id, chars)
        return self.advance(inputs.audio, inputs.condition, self.new_state())[1]

    def bounded(self, state: EarTtsState, pinned: int, newest: int) -> EarTtsState:
        """A state that remembers the first ``pinned`` positions and the ``newest`` after them, and no more.

        Positions count from the first of the voice prompt, so ``pinned`` is its length if the voice is to stay, and
        the present frame is one of the newest. While the history is no longer than both together the bound takes
        nothing away; after that a step costs the same for ever. From then on it takes one position at a time.

        Args:
            state: one that keeps everything, of any length. It stays usable: the result shares no buffer with it.
            pinned: positions, at least 0.
            newest: positions, at least 1.

        Raises:
            InputError: for sizes out of range, a state that is bounded already, or one that dropped what must be kept.
        """
        return EarTtsState(self.backbone.bounded(state.caches, pinned, newest))

    def rewound(self, state: EarTtsState, positions: int) -> EarTtsState | None:
        """A copy of an unbounded state as it was before its latest ``positions``.

        None where a layer's window has dropped something.
        """
        caches = self.backbone.rewound(state.caches, positions)
        return None if caches is None else EarTtsState(caches)

    def advance(self, audio: mx.array, condition: mx.array, state: EarTtsState) -> tuple[mx.array, EarTtsState]:
        """The backbone's next n positions, from ``[1, n, H]`` branches -> hidden ``[rows, n, H]``."""
        hidden, caches = self.backbone.step(self.fuse(audio, condition), state.caches)
        return hidden, EarTtsState(caches)

    def step(
        self, condition: mx.array, codes: mx.array, draws: Draws, state: EarTtsState
    ) -> tuple[mx.array, mx.array, EarTtsState]:
        """One frame: the token's vector ``[1, 1, H]`` and the previous codes ``[1, 1, Q]``.

        Returns this frame's codes ``[1, 1, Q]`` int32, the hidden states ``[rows, 1, H]`` and the new state.
        """
        return self.decode(condition, codes, draws, state, self.reserve(state))

    def reserve(self, state: EarTtsState) -> tuple[At, ...]:
        """Make room for one position and count it: what ``decode`` needs to know of it. ``state`` changes."""
        return self.backbone.reserve(state.caches)

    def grown(self, state: EarTtsState) -> EarTtsState | None:
        """A state to compile ``decode`` for: of the capacity after the present one. None if it will keep its own."""
        caches = self.backbone.grown(state.caches)
        return None if caches is None else EarTtsState(caches)

    def decode(
        self, condition: mx.array, codes: mx.array, draws: Draws, state: EarTtsState, at: tuple[At, ...]
    ) -> tuple[mx.array, mx.array, EarTtsState]:
        """``step`` at the position that was reserved: arrays only, of shapes that stay."""
        hidden, caches = self.backbone.decode(self.fuse(self.embed_codes(codes), condition), state.caches, at)
        return self.sample(hidden, draws), hidden, EarTtsState(caches)

    def sample(self, hidden: mx.array, draws: Draws) -> mx.array:
        """One frame's codes ``[1, 1, Q]`` int32 from its hidden states ``[rows, 1, H]``."""
        return self.draw(hidden, draws).codes

    def draw(self, hidden: mx.array, draws: Draws) -> Drawn:
        """Fix one frame's codes pass by pass; each pass hears the sum of the levels fixed before it."""
        tables, norms = self._tables(self.rvq_embs), self._norms(self.rvq_embs)
        depth: mx.array | None = None
        codes: list[mx.array] = []
        gaussians: list[tuple[mx.array, mx.array]] = []
        for (start, count), u, normals in zip(self.passes, *draws, strict=True):
            mean, log_std = self.mog_head(self._heard(hidden, depth), u)
            latent = mean + mx.exp(log_std) * normals * self.config.noise_scale
            levels, depth = quantize(latent, depth, tables, norms, start, count)
            codes += levels
            gaussians.append((mean, log_std))
        means, log_stds = map(list, zip(*gaussians, strict=True))
        return Drawn(mx.stack(codes, axis=-1).astype(mx.int32), means, log_stds)

    def _heard(self, hidden: mx.array, depth: mx.array | None) -> mx.array:
        """Hidden states ``[rows, 1, H]`` plus what is fixed already, ``[1, 1, L]``: of no level, that would be zero."""
        if depth is None:
            return hidden
        return self.embed_code.add(mx.broadcast_to(depth, (hidden.shape[0], *depth.shape[1:])), hidden)

    @property
    def passes(self) -> tuple[tuple[int, int], ...]:
        """First level and number of levels of each of a frame's passes."""
        return passes(self.config.num_quantizers, self.config.num_iterations, self.config.exponent)
