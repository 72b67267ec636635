"""How often each sentence is presented: free combinations most of the time, rare words before common ones.

What fails first in training is what is heard seldom and in few places: names, numbers at the end, rare words. But what
is finite is learned by heart, from its first word and the sound so far, and teaches nobody to read: with 60 % of it the
network never learned to say a second word from its text. So free combinations (repeats, lists, carrier sentences) have
the larger part, and within a kind the sentences with rare words come first.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from training import domain

__all__ = ["FIXED_SHARE", "REPEAT", "presented", "shares_of"]

FIXED_SHARE = 0.30
FREE_SHARES = {"repeat": 0.15, "list": 0.35, "carrier": 0.20}
REPEAT = "repeat"
RAREST = 8.0  # how much more often than the commonest a rare word's sentence may be drawn


def words(text: str) -> list[str]:
    """The words of a sentence in lower case."""
    return re.findall(r"[a-z']+", text.lower())


def shares_of(kinds: Sequence[str], texts: Sequence[str]) -> dict[str, float]:
    """Each kind's share of what is presented. Among fixed forms it grows with the root of answers times asking."""
    answers = {kind: len({t for t, k in zip(texts, kinds, strict=True) if k == kind}) for kind in set(kinds)}
    fixed = {k: (n * domain.WEIGHTS[k]) ** 0.5 for k, n in answers.items() if k not in FREE_SHARES}
    total = sum(fixed.values())
    shares = {kind: FIXED_SHARE * value / total for kind, value in sorted(fixed.items())}
    return shares | FREE_SHARES


def presented(texts: Sequence[str], kinds: Sequence[str], shares: dict[str, float]) -> NDArray[np.float64]:
    """How often each text is to be drawn, ``[N]``, summing to one.

    Within a kind a sentence counts by the reciprocal of how many sentences its rarest word is in, at most ``RAREST``
    times the least. A kind that has no sentence leaves its share to the others.
    """
    known = [set(words(text)) for text in texts]
    counts = Counter(word for some in known for word in some)
    rarity = np.array([1 / min((counts[word] for word in some), default=1) for some in known])
    result, labels = np.zeros(len(texts)), np.array(kinds)
    for kind, share in shares.items():
        members = np.flatnonzero(labels == kind)
        if members.size:
            values = np.minimum(rarity[members], RAREST * rarity[members].min())
            result[members] = share * values / values.sum()
    return np.asarray(result / result.sum())
