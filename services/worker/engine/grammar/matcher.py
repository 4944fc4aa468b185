"""One request's way through its grammar."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from services.worker.engine.grammar.compiler import CompiledGrammar, Mask, fill, reason, refused
from shared.errors import Internal

_REPLAYED_AT_ONCE = 64
"""Tokens; other threads have the interpreter between."""


class GrammarMatcher:
    """Which tokens may come next in one answer. For one thread at a time; different matchers may be used at once.

    Errors are final, and of this request alone.
    """

    __slots__ = ("_compiled", "_compiler", "_ended", "_matcher", "_own", "_token_ids")

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._compiler = compiled.compiler
        self._matcher = compiled.start()
        self._own = False
        """Whether its automaton is its own: nobody else's limits are met there."""
        self._token_ids: list[int] = []
        self._ended = False

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow, or it has come: the answer ends."""
        return self._ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    @property
    def may_end(self) -> bool:
        """What there is is whole, also if more may follow."""
        return self._ended or self._matcher.is_accepting()

    def mask(self, out: Mask) -> None:
        """Set ``out``, int32 ``[ceil(vocab_size / 32)]`` in one piece, to the tokens that may come next; those that end
        an answer are there exactly if it ``may_end``. Releases the interpreter.

        Raises ``BadRequest`` for a grammar that has become too costly, or that nothing of the vocabulary follows.
        """
        if not fill(self._matcher, out):
            self._start_over()
            if not fill(self._matcher, out):
                raise refused(reason(self._matcher))
        words = out.view(np.uint32)
        for token_id in self._compiler.hidden_ids:
            words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if not out.any() and not self.is_complete:
            raise refused("no token of this model continues the answer")

    def accept(self, token_id: int) -> None:
        """``token_id`` came next. Raises ``Internal`` if it may not, ``BadRequest`` as ``mask`` does."""
        if self._ended:
            raise Internal(f"token {token_id} came behind the end of an answer with a grammar")
        if token_id in self._compiler.end_ids:
            self._end(token_id)
            return
        self._consume([token_id])

    def replay(self, token_ids: Iterable[int]) -> None:
        """What earlier attempts have written, from the start. Raises as ``accept`` does."""
        taken: list[int] = []
        for token_id in token_ids:
            if self._ended or token_id in self._compiler.end_ids:
                self._consume(taken)
                taken = []
                self.accept(token_id)
                continue
            taken.append(token_id)
            if len(taken) == _REPLAYED_AT_ONCE:
                self._consume(taken)
                taken = []
        self._consume(taken)

    def _end(self, token_id: int) -> None:
        if not self.may_end:
            raise Internal(f"token {token_id} ends an answer that is not whole by its grammar")
        self._ended = True

    def _consume(self, token_ids: list[int]) -> None:
        if not token_ids:
            return
        if not self._take(token_ids):
            self._start_over()
            self._take_each(token_ids)
        self._token_ids += token_ids

    def _take(self, token_ids: list[int]) -> bool:
        # It would raise something else for an id that is none.
        inside = min(token_ids) >= 0 and max(token_ids) < self._compiler.vocab_size
        return inside and self._matcher.consume_tokens(token_ids)

    def _take_each(self, token_ids: list[int]) -> None:
        """Says what is wrong: a token that may not come, or a limit that is met behind it."""
        out = np.zeros((self._compiler.vocab_size + 31) // 32, np.int32)
        for token_id in token_ids:
            if not fill(self._matcher, out):
                raise refused(reason(self._matcher))
            if not (0 <= token_id < self._compiler.vocab_size and out[token_id // 32] >> token_id % 32 & 1):
                raise Internal(f"token {token_id} does not follow the grammar of its answer")
            if not self._take([token_id]):
                raise refused(reason(self._matcher))

    def _start_over(self) -> None:
        """A limit may have been met by others of the same grammar, whose automaton is of no use any more."""
        if self._own:
            return
        self._own = True
        self._compiled.forget()
        self._matcher = self._compiled.fresh()
        for start in range(0, len(self._token_ids), _REPLAYED_AT_ONCE):
            self._matcher.consume_tokens(self._token_ids[start : start + _REPLAYED_AT_ONCE])
