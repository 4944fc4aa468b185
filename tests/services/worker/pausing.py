"""An engine's thread that runs no step for a while, and everything else."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.engine.thread import EngineThread


class _Paused:
    """Stands for a loop's ``step``."""

    def __init__(self, loop: EngineLoop, request_ids: set[str], tokens: int) -> None:
        self._loop = loop
        self._request_ids = request_ids
        self._tokens = tokens

    def __call__(self) -> StepOutput | None:
        """Once it is so, it begins nothing: there is work and no room for it, as far as the thread can tell."""
        loop = self._loop
        running = loop.scheduler.table.running
        if not self._request_ids - {s.request_id for s in running if len(s.output) >= self._tokens}:
            self._request_ids = set()
            if loop.is_quiet:
                return None
            vars(loop).setdefault("_begin", self._ends_begun)
        return EngineLoop.step(loop)

    def _ends_begun(self) -> bool:
        """What is in flight lands, and a step that has begun is ended."""
        return self._loop._begun is not None and EngineLoop._begin(self._loop)


def pause(engine: EngineThread, request_ids: Iterable[str] = (), tokens: int = 1) -> Future[None]:
    """Run commands but no steps until ``resume``; done when the step in progress is over. ``request_ids``: not before
    these are decoded here and have so many tokens, all at once."""
    wanted = set(request_ids)

    def hold(loop: EngineLoop) -> None:
        loop.step = _Paused(loop, wanted, tokens)  # type: ignore[method-assign]

    return engine.call(hold)


def resume(engine: EngineThread) -> Future[None]:
    """Run steps again."""

    def let_go(loop: EngineLoop) -> None:
        if isinstance(vars(loop).get("step"), _Paused):
            del loop.step
            vars(loop).pop("_begin", None)

    return engine.call(let_go)
