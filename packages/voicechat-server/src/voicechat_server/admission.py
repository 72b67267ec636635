"""Who may talk: as many sessions as there are slots, which is one. A slot is held by a ``with`` block and nothing else.

    with admission.slot() as admitted:
        if admitted: ...

Whatever ends the block gives the slot back: an error, a cancellation, a reset of the connection. It is to be closed
before the close frame is sent, so that who sees the frame can come again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Admission"]


class Admission:
    """Counts slots. Belongs to one Trio, so that nothing happens between a look and a grab."""

    def __init__(self, slots: int = 1) -> None:
        self.slots = slots
        self.taken = 0

    @property
    def free(self) -> bool:
        """Whether a session would be admitted now."""
        return self.taken < self.slots

    @contextmanager
    def slot(self) -> Iterator[bool]:
        """Hold a slot for as long as the block lasts; False where none is free, and then none is held."""
        if not self.free:
            yield False
            return
        self.taken += 1
        try:
            yield True
        finally:
            self.taken -= 1
