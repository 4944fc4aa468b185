"""Stop strings over token boundaries: text that may turn out to begin one is held back."""

from __future__ import annotations


class StopScanner:
    """Finds the earliest stop string in a growing text.

    ``include`` keeps the stop string itself in the output. After ``stopped`` is set, nothing more may be pushed.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "stopped")

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._stops = stops
        self._longest = max(len(stop) for stop in stops)
        self._include = include
        self._held = ""
        self.stopped = False

    def push(self, delta: str) -> str:
        """The text that may be shown now."""
        if not delta:
            return ""
        text = self._held + delta
        at, match = min(
            ((found, stop) for stop in self._stops if (found := text.find(stop)) >= 0),
            key=lambda hit: (hit[0], len(hit[1])),
            default=(-1, ""),
        )
        if at >= 0:
            self.stopped = True
            self._held = ""
            return text[: at + len(match)] if self._include else text[:at]
        keep = self._overlap(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
