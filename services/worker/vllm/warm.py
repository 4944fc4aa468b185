"""Processes of vLLM that wait: imported, for any model, or started, for one.

vLLM takes long to import, and less to start. A worker that offers it keeps a process that has imported. One whose
instance has gone stays, too, until the worker takes another model or memory gets scarce: the next instance of its model
begins where it left off, and one of other weights in the same shape takes only these. One for a model that is kept warm
starts with weights that mean nothing, where other ones can come into it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from services.worker.config import WarmStage
from services.worker.vllm.blitz_vllm import words
from services.worker.vllm.front_process import FrontProcess, remove_leftovers
from services.worker.vllm.served_model import ServedModel, Shape
from shared.aio import OwnedTasks, in_thread
from shared.cgroup import limits, memory_left
from shared.engines import OTHERS
from shared.errors import BlitzError, EngineBroken
from shared.messages.registry import WarmEngine

log = logging.getLogger(__name__)

LOOK_S = 2.0
QUIET_S = 2.0
"""After an instance came or went, until one is started for a model that is kept warm."""
PAUSE_S = 300.0
"""The same, where one failed, or had no room."""
START_S = OTHERS["vllm"].start_s
"""Longest that vLLM may take from the start of its process until it serves."""
MAX_REMEMBERED = 256
MAX_FAILURES = 5
"""Of starts in a row."""
GIVEN_UP_S = 3600.0
MIN_AVAILABLE = 0.1
"""Share of the memory of the host, and of the container: with less, a started process goes."""


@dataclass(slots=True)
class StartedFront:
    """A process that takes requests, of nobody at the moment."""

    front: FrontProcess
    shape: Shape
    model_hash: str
    """Of the weights that it has; empty: of none."""
    owns_weights: bool
    """It sees no memory of the worker's any more."""
    takes_others: bool
    """Whether other weights come into it as they would into a new one."""
    load: words.EngineLoad
    """What it said last: its counters go on from here."""


class WarmFronts:
    """Of one worker. Event loop only."""

    def __init__(self, python: str, threads: int, stage: WarmStage) -> None:
        """``stage``: how far processes that wait may be."""
        self._python = python
        self._threads = threads
        self._stage = stage
        self._imported: FrontProcess | None = None
        self._started: StartedFront | None = None
        self._failures: dict[Shape, tuple[int, float, str]] = {}
        """Of starts in a row: how many, when the last one was (monotonic), and what it said."""
        self._no_others: set[Shape] = set()
        """No weights come into what has started."""
        self._making = asyncio.Lock()
        self._starting: tuple[Shape, asyncio.Task[None]] | None = None
        """Without weights."""
        self._quiet_since_s = time.monotonic()
        """No instance has come or gone since then."""
        self._pause_s = QUIET_S
        """From then on, until one is started for a model that is kept warm."""
        self._tasks = OwnedTasks()
        self._watching: asyncio.Task[None] | None = None

    async def take_started(
        self, shape: Shape, model_hash: str, is_wanted: Callable[[], bool] = lambda: True
    ) -> StartedFront | None:
        """The one that waits, or is about to, if this model's instance can go on with it; if not, it ends.
        ``is_wanted``: False for an instance that went before it was there."""
        self._quiet_since_s, self._pause_s = time.monotonic(), QUIET_S
        if self._starting is not None:
            starts, task = self._starting
            if starts != shape:
                task.cancel()
            await asyncio.wait({task})
            if not is_wanted():
                return None
        started, self._started = self._started, None
        if started is None or started.front.is_over:
            return None
        if started.shape != shape or not (started.model_hash == model_hash or started.takes_others):
            log.info("the vLLM that waited for another model's instance ends")
        elif await started.front.is_well():
            return started
        else:
            log.warning("the vLLM that waited does not answer, and ends")
        started.front.close()
        return None

    def start_for(self, model: ServedModel) -> None:
        """Have one wait that was started for this model, where its weights can come later, and unless one does."""
        shape = model.shape
        if self._stage != "started" or self._starting is not None or shape in self._no_others:
            return
        if self._started is not None and self._started.shape == shape and not self._started.front.is_over:
            return
        if time.monotonic() < self._quiet_since_s + self._pause_s or not _has_room(model.num_bytes + model.kv_bytes):
            return
        try:
            self.check(shape)
        except EngineBroken:
            return
        self.drop_started()
        task = self._tasks.start(self._start_for(model))
        self._starting = shape, task
        task.add_done_callback(self._forget_starting)

    def _forget_starting(self, task: asyncio.Task[None]) -> None:
        if self._starting is not None and self._starting[1] is task:
            self._starting = None

    async def _start_for(self, model: ServedModel) -> None:
        front = None
        try:
            await in_thread(model.check)
            front = await self.take()
            imported = front.imported or await front.answer(words.Imported, START_S)
            if imported.lacks:
                raise EngineBroken(imported.refusal)
            started = await front.answer(words.Started, START_S, model.start(""))
            kept = StartedFront(front, model.shape, "", True, started.refills, words.EngineLoad())
            if not started.refills:
                log.info("no vLLM waits for %s: it takes weights at its start only", model.path)
                if len(self._no_others) >= MAX_REMEMBERED:
                    self._no_others.clear()
                self._no_others.add(model.shape)
            elif self.keep(kept):
                log.info("a vLLM that started in %.1f s waits for the weights of %s", started.seconds, model.path)
                front = None
            else:
                self._end_for_memory()
        except (BlitzError, OSError) as error:
            log.warning("no vLLM waits for %s: %s", model.path, error)
            self._quiet_since_s, self._pause_s = time.monotonic(), PAUSE_S
            if front is not None:
                self.failed(model.shape, str(error), is_final=front.failure_is_final)
        finally:
            if front is not None:
                front.close()
        await self.prepare()

    async def take(self) -> FrontProcess:
        """One that has imported vLLM, or does. Raises ``EngineBroken`` where none can be started."""
        front, self._imported = self._imported, None
        if front is not None and not front.is_over:
            return front
        return await self._new()

    async def _new(self) -> FrontProcess:
        await in_thread(remove_leftovers)
        try:
            front = FrontProcess(self._python)
        except OSError as error:
            raise EngineBroken(f"no folder for a process of vLLM: {error.strerror}") from error
        try:
            await front.start(threads=self._threads)
        except BaseException as error:
            front.close()
            if isinstance(error, OSError):
                raise EngineBroken(f"no process of vLLM: {error.strerror}") from error
            raise
        return front

    def give_back(self, front: FrontProcess) -> None:
        """It was taken, and is not needed."""
        if self._imported is None and not front.is_over:
            self._imported = front
        else:
            front.close()

    @property
    def engine(self) -> WarmEngine | None:
        """What waits."""
        started = self._started
        if started is None or started.front.is_over:
            return None
        return WarmEngine(kind=started.shape.kind, model_hash=started.model_hash, takes_others=started.takes_others)

    @property
    def num_waiting(self) -> int:
        """Processes that wait, or are about to."""
        return sum(front is not None for front in (self._imported, self._started))

    @property
    def is_starting(self) -> bool:
        """One that will wait is."""
        return self._starting is not None

    def check(self, shape: Shape) -> None:
        """Raises ``EngineBroken`` where starting one has failed too often to try it again now."""
        failures, last_s, why = self._failures.get(shape, (0, 0.0, ""))
        if failures >= MAX_FAILURES and time.monotonic() < last_s + GIVEN_UP_S:
            raise EngineBroken(f"vLLM does not start, and is not tried here for an hour: {why}")

    def failed(self, shape: Shape, why: str, *, is_final: bool = False) -> None:
        """One of this shape did not start. ``is_final``: nor would another one."""
        failures = MAX_FAILURES if is_final else self._failures.pop(shape, (0, 0.0, ""))[0] + 1
        self._failures[shape] = failures, time.monotonic(), why
        if len(self._failures) > MAX_REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def served(self, shape: Shape) -> None:
        """One of this shape did."""
        self._failures.pop(shape, None)

    def keep(self, started: StartedFront) -> bool:
        """Whether it may wait here for its next instance; if not, it is to be ended."""
        self._quiet_since_s, self._pause_s = time.monotonic(), QUIET_S
        if self._stage != "started" or started.front.is_over or not _has_room():
            return False
        self._end_started()
        self._started = started
        started.front.attach(self._heard_waiting, self._forget_started)
        if self._watching is None or self._watching.done():
            self._watching = self._tasks.start(self._watch_memory())
        return True

    def _heard_waiting(self, word: words.ToWorker) -> None:
        """Of the one that waits."""
        if isinstance(word, words.Failed):
            log.warning("a vLLM that waited for its next instance has failed: %s", word.reason)
            self.drop_started()

    def _forget_started(self, why: str) -> None:
        log.warning("a vLLM that waited for its next instance is gone: %s", why)
        self._started = None

    async def _watch_memory(self) -> None:
        while self._started is not None:
            if not _has_room():
                self._end_for_memory()
            await asyncio.sleep(LOOK_S)

    def _end_for_memory(self) -> None:
        log.info("memory is scarce: the vLLM that waited for its next instance ends")
        self._quiet_since_s, self._pause_s = time.monotonic(), PAUSE_S
        self._end_started()

    def drop_started(self) -> None:
        """Its memory is needed."""
        if self._starting is not None:
            self._starting[1].cancel()
        self._end_started()

    def _end_started(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            started.front.close()

    async def prepare(self) -> None:
        """Have one import, if none does: for the instance after this one."""
        async with self._making:
            if self._stage == "none" or (self._imported is not None and not self._imported.is_over):
                return
            try:
                front = await self._new()
            except EngineBroken as error:
                log.warning("no vLLM waits: %s", error.message)
                return
            front.attach(self._heard_imported, lambda why: log.warning("no vLLM waits: %s", why))
            self.give_back(front)

    def _heard_imported(self, word: words.ToWorker) -> None:
        """Of the one that imports."""
        if isinstance(word, words.Imported) and word.lacks:
            log.warning("no vLLM waits: %s", word.refusal)

    async def close(self) -> None:
        """End all that wait."""
        self.drop_started()
        self._stage = "none"
        front, self._imported = self._imported, None
        if front is not None:
            front.close()
        await self._tasks.close()


def _has_room(num_bytes: int = 0) -> bool:
    """Whether memory is left for so much, and more."""
    memory, limit = psutil.virtual_memory(), limits().memory_bytes
    left = (memory.available - num_bytes) / memory.total
    return min(left, memory_left() - (num_bytes / limit if limit else 0.0)) >= MIN_AVAILABLE
