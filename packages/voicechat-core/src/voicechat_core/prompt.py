"""The states that a timeline begins with: after the voice prompt and the system prompt, before the first frame.

What of them is the same for every session is computed once and copied for each: a step consumes its state, so nothing
that is kept here is ever stepped on.

* The speech decoder hears nothing of a system prompt and draws by the step's ordinal alone: its state after n steps is
  a constant of the model, whatever the words and the seed. The longest is kept; for a shorter prompt a copy is rewound.
* The language model's state depends on the words. That of the checkpoint's own prompt is kept, any other prompt is one
  scan.

Like the model's, these arrays belong to the thread that first asks for them.
"""

from collections.abc import Callable

import mlx.core as mx

from voicechat_core import duplex
from voicechat_core.duplex import DuplexState, SpeechState
from voicechat_core.errors import ModelError
from voicechat_core.model import VoiceChatModel
from voicechat_core.nn import state as states
from voicechat_core.noise import KeyedNoise

__all__ = ["PromptStates"]

MARK_STEPS = 16  # the longest way from a state that is kept
SHORT_WINDOW = 512  # at voicechat-small's size a state of so many positions is 4 MB


class PromptStates:
    """A model's opening states, each a copy of its own."""

    def __init__(self, model: VoiceChatModel) -> None:
        self.model = model
        self._noise = KeyedNoise(0, model.config.tts_config)  # a prompt's draws ignore the seed
        self._speech: SpeechState | None = None  # after the most steps so far
        self._marks: dict[int, SpeechState] = {}  # after 0, 16, 32, ... steps, where the longest cannot be rewound
        self._codes: list[mx.array] = []  # the previous codes after 0, 1, 2, ... steps
        self._default: DuplexState | None = None  # after the checkpoint's own prompt; without a speech decoder's state

    def opening(
        self,
        prompt_ids: list[int],
        *,
        tts_prompt_steps: bool = True,
        tts_context_frames: int | None = None,
        after_each: Callable[[int], None] | None = None,
    ) -> DuplexState:
        """The timeline after a prompt.

        Args:
            prompt_ids: of every position of the prompt; may be empty.
            tts_prompt_steps: whether the speech decoder takes its PAD steps over the prompt.
            tts_context_frames: from here on, let it look back at the voice prompt and this many positions only.
            after_each: told the positions done, as steps have to be computed, and at the end.

        Raises:
            ModelError: when the model computes something that is not a number.
        """
        steps = max(0, len(prompt_ids) - 1) if tts_prompt_steps else 0  # none at position 0
        speech = self.speech(steps, after_each)
        if tts_context_frames is not None:
            tts = self.model.networks.tts_model.tts_model
            speech.ear_tts = tts.bounded(speech.ear_tts, self.model.config.prompt_frames, tts_context_frames)
        state = self._heard(prompt_ids)
        state.speech = speech
        states.evaluate(state)
        if prompt_ids and after_each is not None:
            after_each(len(prompt_ids))
        return state

    def warm_up(self, prompt_tokens: int = 0) -> None:
        """Compute ahead what sessions share: for the checkpoint's own prompt, and for prompts of so many tokens."""
        default = self.model.prompt_ids(None)
        self._heard(default)
        self._extend(max(len(default), prompt_tokens) - 1, None)

    def speech(self, steps: int, after_each: Callable[[int], None] | None = None) -> SpeechState:
        """The speech decoder after the voice prompt and ``steps`` PAD steps."""
        longest = self._extend(steps, after_each)
        if longest.steps == steps:
            return states.copy(longest)
        tts = self.model.networks.tts_model.tts_model
        rewound = tts.rewound(longest.ear_tts, longest.steps - steps)
        if rewound is not None:
            return SpeechState(rewound, mx.array(self._codes[steps]), steps)
        # A window no longer than the prompt has forgotten what stood before: on from the last state that was kept.
        speech = self._nearest(steps)
        while speech.steps < steps:
            speech = self._stepped(speech)
            if after_each is not None:
                after_each(speech.steps)
        return speech

    def _extend(self, steps: int, after_each: Callable[[int], None] | None) -> SpeechState:
        """The longest state; each step that is done stays, whatever ``after_each`` raises."""
        if self._speech is None:
            speech = duplex.first_speech(self.model, self.model.warm_up())
            self._codes, self._speech, self._marks = [speech.codes], speech, {}
            self._mark(speech)
        while self._speech.steps < steps:
            speech, self._speech = self._speech, None  # an interrupted step leaves nothing that could be used
            speech = self._stepped(speech)
            self._codes.append(speech.codes)
            self._mark(speech)
            self._speech = speech
            if after_each is not None:
                after_each(speech.steps)
        return self._speech

    def _mark(self, speech: SpeechState) -> None:
        """Keep a copy of every sixteenth state where a short window forgets what a prompt began with.

        Such a state is small, as its window is. Through a long one, as the published, any prompt can be rewound.
        """
        if speech.steps % MARK_STEPS == 0 and self.model.networks.tts_model.tts_model.shortest_window <= SHORT_WINDOW:
            self._marks[speech.steps] = states.copy(speech)

    def _nearest(self, steps: int) -> SpeechState:
        """The latest state at hand that took no more steps."""
        before = max((marked for marked in self._marks if marked <= steps), default=None)
        if before is None:
            return duplex.first_speech(self.model, self.model.warm_up())
        return states.copy(self._marks[before])

    def _stepped(self, speech: SpeechState) -> SpeechState:
        speech, finite = duplex.prompt_step(self.model, speech, self._noise)
        _require(finite)
        return speech

    def _heard(self, prompt_ids: list[int]) -> DuplexState:
        """The timeline after one scan of the trunk over the prompt; of the checkpoint's own, a copy."""
        if prompt_ids != self.model.prompt_ids(None):
            return self._scanned(prompt_ids)
        if self._default is None:
            self._default = self._scanned(prompt_ids)
        return states.copy(self._default)

    def _scanned(self, prompt_ids: list[int]) -> DuplexState:
        nothing = SpeechState(self.model.networks.tts_model.tts_model.new_state(), mx.zeros((1, 1, 0), mx.int32))
        frame, state = duplex.listen(self.model, prompt_ids, nothing)
        states.evaluate(state)
        if frame is not None:
            _require(frame.finite)
        return state


def _require(finite: mx.array) -> None:
    if not finite.item():
        raise ModelError("the system prompt: the model computed a value that is not finite")
