"""Which of an instance's requests vLLM has.

All of them, unless one is there that workers have died with (``Submit.alone_tokens``): while that puts out its first
tokens vLLM has no other, and it is said when this begins and ends. The others leave vLLM meanwhile, and come back with
what they had put out, which its prefix cache knows.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.vllm.blitz_vllm import words

Key = tuple[str, int]


class Turns:
    """Event loop only."""

    def __init__(
        self,
        say: Callable[[words.Add | words.Leave], None],
        word_of: Callable[[ActiveSequence, str], words.Add],
        announce: Callable[[ActiveSequence, bool], None],
    ) -> None:
        """``say``: to vLLM. ``word_of``: a request with what it has put out, under this id. ``announce``: that a
        request is computed alone from now on, or not any more."""
        self._say = say
        self._word_of = word_of
        self._announce = announce
        self._serials = itertools.count()
        self._there: dict[str, ActiveSequence] = {}
        """In vLLM, by the id that they have there: another one each time."""
        self._ids: dict[Key, str] = {}
        self._waiting: dict[Key, ActiveSequence] = {}
        """Until one is not alone any more; in the order in which they came."""
        self._suspects: deque[ActiveSequence] = deque()
        self._alone: ActiveSequence | None = None
        self._has_begun = False
        """It was announced."""

    def of(self, request_id: str) -> ActiveSequence | None:
        """Whom vLLM means by it; None: it has left."""
        return self._there.get(request_id)

    def add(self, sequence: ActiveSequence) -> None:
        """Raises ``ValueError`` where its grammar is none, or cannot follow what it has put out."""
        if sequence.is_guided:
            self._word_of(sequence, "")
        if sequence.alone:
            self._suspects.append(sequence)
        else:
            self._waiting[sequence.key] = sequence
        self._go_on()

    def _go_on(self) -> None:
        if self._alone is not None:
            return
        while self._suspects and self._suspects[0].finished:  # they end together with the one before
            self._suspects.popleft()
        if self._suspects:
            for other in list(self._there.values()):
                self._take_back(other)
                self._waiting[other.key] = other
            self._alone, self._has_begun = self._suspects.popleft(), False
            self._give(self._alone)
            return
        waiting, self._waiting = self._waiting, {}
        for sequence in waiting.values():
            if not sequence.finished:
                self._give(sequence)

    def _give(self, sequence: ActiveSequence) -> None:
        name = f"{next(self._serials)}:{sequence.request_id}"
        self._there[name] = sequence
        self._ids[sequence.key] = name
        self._say(self._word_of(sequence, name))

    def _take_back(self, sequence: ActiveSequence) -> None:
        name = self._ids.pop(sequence.key)
        del self._there[name]
        self._say(words.Leave(id=name))

    def begins(self, name: str) -> None:
        """No step of others runs any more."""
        if self._alone is not None and self._there.get(name) is self._alone:
            self._has_begun = True
            self._announce(self._alone, True)

    def advanced(self, sequence: ActiveSequence) -> None:
        """It has put something out, or has ended."""
        if sequence.finished and (name := self._ids.pop(sequence.key, None)) is not None:
            del self._there[name]
        if self._alone is sequence and (sequence.finished or not sequence.alone):
            if self._has_begun and not sequence.finished:
                self._announce(sequence, False)
            self._alone = None
            self._go_on()

    def drop(self, sequence: ActiveSequence) -> None:
        """It is not wanted any more."""
        self._waiting.pop(sequence.key, None)
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        if sequence.key in self._ids:
            self._take_back(sequence)
        if self._alone is sequence:
            self._alone = None
            self._go_on()
