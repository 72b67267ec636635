"""Choices among candidates that turned out differently from NVIDIA's, and how near a tie they were. Knows no model."""

import numpy as np

from voicechat_core.goldens import Arrays

__all__ = ["every_flip", "first_flip"]

# Choices, and how far NVIDIA's were from being others: the gap between the best two candidates.
MARGINS = {
    "gen_text_timeline": "text_margin",
    "gen_function_timeline": "function_margin",
    "codes": "code_margin",
    "codes_from_t1": "code_margin_from_t1",
    "step_codes": "step_code_margin",
}
LOGITS = ("text_logits", "function_logits", "joint_logprobs")  # what is chosen here is the largest
LISTED_AT_MOST = 20


def first_flip(tensor: str, ours: Arrays, golden: Arrays) -> str:
    """Where ids or codes begin to differ, and by how much the choice there was ahead; empty for other tensors.

    What follows in a run that feeds on its own choices is a consequence of the first.
    """
    if tensor not in MARGINS or np.array_equal(ours[tensor], golden[tensor]):
        return ""
    first = tuple(int(i) for i in np.argwhere(ours[tensor] != golden[tensor])[0])
    note = f"from {list(first)} on"
    for whose, margins in (("NVIDIA's", golden.get(MARGINS[tensor])), ("our", ours.get(MARGINS[tensor]))):
        if margins is not None:
            return f"{note}, where {whose} choice is ahead by {margins[first]:.2g}"
    return note


def every_flip(tensor: str, ours: Arrays, golden: Arrays) -> str:
    """Each place where the choice differs, with NVIDIA's margin; empty for tensors that are no choices.

    For stages in which every position has NVIDIA's own past: there logits are choices too.
    """
    margins: np.ndarray | None
    if tensor in LOGITS:
        best = np.sort(golden[tensor], axis=-1)
        margins = best[..., -1] - best[..., -2]
        differ = ours[tensor].argmax(-1) != golden[tensor].argmax(-1)
    elif tensor in MARGINS:
        margins, differ = golden.get(MARGINS[tensor]), ours[tensor] != golden[tensor]
    else:
        return ""
    places = [tuple(int(i) for i in place) for place in np.argwhere(differ)]
    listed = [f"{list(at)}" + (f" by {margins[at]:.2g}" if margins is not None else "") for at in places]
    more = [f"and {len(places) - LISTED_AT_MOST} more"] if len(places) > LISTED_AT_MOST else []
    note = f"{len(places)} of {differ.size} choices differ"
    return f"{note}: {', '.join([*listed[:LISTED_AT_MOST], *more])}" if places else note
