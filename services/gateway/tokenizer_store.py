"""The tokenizers of the registered models: loaded on first use, in a thread, and dropped when no longer used.

Loads run one at a time: the library holds the interpreter while it reads a file (about 25 ms per MB), so two at once
would only stall the event loop for longer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from services.gateway.tokenizer import ModelTokenizer, load_tokenizer, tokenizer_bytes
from shared.errors import BlitzError
from shared.messages.registry import ModelRecord

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 30.0

Key = tuple[str, str]
"""Path and hash of a checkpoint."""


@dataclass(slots=True)
class _Entry:
    load: asyncio.Task[tuple[ModelTokenizer, int]]
    used_s: float
    num_bytes: int = 0


class TokenizerStore:
    """Tokenizers by checkpoint. Concurrent callers share a load. Requests keep their tokenizer until they end."""

    def __init__(self, *, max_bytes: int, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._clock = clock
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        """The least recently used one first."""
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @property
    def num_bytes(self) -> int:
        """Of all that are loaded, by estimate."""
        return sum(entry.num_bytes for entry in list(self._entries.values()))

    def __len__(self) -> int:
        """Tokenizers loaded or being loaded."""
        return len(self._entries)

    def forget_others(self, records: Iterable[ModelRecord]) -> None:
        """Drop the tokenizers of all but these models."""
        wanted = {_key(record) for record in records}
        for key in self._entries.keys() - wanted:
            self._drop(key)

    async def get(self, record: ModelRecord) -> ModelTokenizer:
        """The tokenizer of a model. Raises ``BadCheckpoint``; a failed load is tried again by the next call."""
        key = _key(record)
        entry = self._entries.get(key)
        if entry is None or (entry.load.done() and (entry.load.cancelled() or entry.load.exception() is not None)):
            entry = self._entries[key] = _Entry(self._start(key), self._clock())
        entry.used_s = self._clock()
        self._entries.move_to_end(key)
        tokenizer, _ = entry.load.result() if entry.load.done() else await asyncio.shield(entry.load)
        return tokenizer

    def sweep(self) -> None:
        """Drop those that have not been used for long."""
        now_s = self._clock()
        for key, entry in list(self._entries.items()):
            if entry.load.done() and now_s - entry.used_s >= self._idle_s:
                self._drop(key)

    async def run(self) -> None:
        """Sweep for ever."""
        while True:
            await asyncio.sleep(min(SWEEP_EVERY_S, self._idle_s))
            self.sweep()

    async def close(self) -> None:
        """Cancel loads in progress."""
        loads = [entry.load for entry in self._entries.values()]
        self._entries.clear()
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _start(self, key: Key) -> asyncio.Task[tuple[ModelTokenizer, int]]:
        task = asyncio.create_task(self._load(key), name=f"tokenizer {key[0]}")
        task.add_done_callback(_log_failure)
        return task

    async def _load(self, key: Key) -> tuple[ModelTokenizer, int]:
        folder = Path(key[0])
        loaded = await asyncio.get_running_loop().run_in_executor(
            self._loader, lambda: (load_tokenizer(folder), tokenizer_bytes(folder))
        )
        entry = self._entries.get(key)
        if entry is not None and entry.load is asyncio.current_task():
            entry.num_bytes = loaded[1]
            self._evict_for(key)
        return loaded

    def _evict_for(self, keep: Key) -> None:
        for key in [key for key, entry in self._entries.items() if entry.load.done() and key != keep]:
            if self.num_bytes <= self._max_bytes:
                return
            self._drop(key)

    def _drop(self, key: Key) -> None:
        # A load that a caller still waits for is completed.
        del self._entries[key]


def _key(record: ModelRecord) -> Key:
    return record.path, record.model_hash


def _log_failure(task: asyncio.Task[tuple[ModelTokenizer, int]]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if isinstance(error, BlitzError):
        log.warning("cannot load a tokenizer: %s", error)
    elif error is not None:
        log.error("cannot load a tokenizer", exc_info=error)
