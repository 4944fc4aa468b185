"""An engine's thread that runs no step for a while, and everything else."""

from __future__ import annotations

from concurrent.futures import Future

from services.worker.engine.loop import EngineLoop
from services.worker.engine.thread import EngineThread


def _no_step() -> None:
    """There is work and no room for it, as far as the thread can tell."""


def pause(engine: EngineThread) -> Future[None]:
    """Run commands but no steps until ``resume``; done when the step in progress is over."""

    def hold(loop: EngineLoop) -> None:
        loop.step = _no_step  # type: ignore[method-assign]

    return engine.call(hold)


def resume(engine: EngineThread) -> Future[None]:
    """Run steps again."""

    def let_go(loop: EngineLoop) -> None:
        if vars(loop).get("step") is _no_step:
            del loop.step

    return engine.call(let_go)
