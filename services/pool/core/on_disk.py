"""Which models workers can read from disk, as they say when they are asked. Monotonic seconds."""

from __future__ import annotations

ANSWER_S = 60.0
"""How old an answer may be before the question is asked again. It counts for as long once more."""
ASKING_S = 20.0
"""After this a question that was not answered may be asked again."""


class OnDisk:
    """By hash. No path is trusted: only what a worker has just looked at counts."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[bool, float]] = {}
        self._asked_s: dict[str, float] = {}

    def forget(self, model_hash: str) -> None:
        """The model is not registered any more."""
        self._answers.pop(model_hash, None)
        self._asked_s.pop(model_hash, None)

    def asked(self, model_hash: str, now_s: float) -> None:
        """The question is on its way."""
        self._asked_s[model_hash] = now_s

    def answered(self, model_hash: str, now_s: float, *, readable: bool) -> bool:
        """Whether that is something new."""
        before = self.is_readable(model_hash, now_s)
        self._asked_s.pop(model_hash, None)
        self._answers[model_hash] = readable, now_s
        return before is not readable

    def is_readable(self, model_hash: str, now_s: float) -> bool | None:
        """None: not known, or not any more."""
        readable, at_s = self._answers.get(model_hash, (None, 0.0))
        return readable if now_s - at_s < 2 * ANSWER_S else None

    def wants_asking(self, model_hash: str, now_s: float) -> bool:
        """Whether there is no fresh answer, and none on its way."""
        if now_s - self._asked_s.get(model_hash, -ASKING_S) < ASKING_S:
            return False
        _, at_s = self._answers.get(model_hash, (None, -ANSWER_S))
        return now_s - at_s >= ANSWER_S or model_hash not in self._answers
