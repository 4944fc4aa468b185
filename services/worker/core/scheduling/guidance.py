"""What keeps a request's output to a grammar, as the scheduler knows it (``engine.grammar`` has the one that there is).

A mask of the tokens that may be next is made beside the steps, from the last token on. A row may be computed before its
mask is there, so that decodes lose no step to it: if it is not there when the token is to be drawn, the row sits the
step out, and is in no other one before its mask has come. Nobody else waits.

That a grammar is complete is known with the mask behind its last token. The request ends then, without another one.
"""

from __future__ import annotations

from typing import Protocol


class Guidance(Protocol):
    """Of one request. It begins behind all tokens that it has put out. On the engine's thread."""

    was_late: bool
    """A row of it sat a step out, and its mask has not been drawn with since."""

    @property
    def is_ready(self) -> bool:
        """The mask of the next token is there, or the reason why there is none."""

    @property
    def is_complete(self) -> bool:
        """Nothing may follow but the end. Unknown before the first mask: False."""

    def accept(self, token_id: int) -> None:
        """It is put out; the next mask is begun. Not called for one that ends the request."""

    def close(self) -> None:
        """The request has ended: what is not begun for it never is."""
