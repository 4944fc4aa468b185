"""The tokenizers of the registered models: loaded once per checkpoint, in threads, dropped with the model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

from services.gateway.tokenizer import ModelTokenizer, load_tokenizer
from shared.errors import BadCheckpoint, BlitzError
from shared.messages.registry import ModelRecord

log = logging.getLogger(__name__)


class TokenizerStore:
    """Tokenizers by checkpoint (path and hash). Loads are shared by all who wait for one."""

    def __init__(self) -> None:
        self._loads: dict[tuple[str, str], asyncio.Task[ModelTokenizer]] = {}

    def keep(self, records: Iterable[ModelRecord]) -> None:
        """Load what these models need, and drop everything else."""
        wanted = {(record.path, record.model_hash) for record in records}
        for key in self._loads.keys() - wanted:
            self._loads.pop(key).cancel()
        for key in sorted(wanted - self._loads.keys()):
            self._load(key)

    async def get(self, record: ModelRecord) -> ModelTokenizer:
        """The tokenizer of a model. Raises ``BadCheckpoint``; a failed load is tried again by the next call."""
        key = (record.path, record.model_hash)
        task = self._loads.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._load(key)
        if task.done():
            return task.result()
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel loads in progress."""
        tasks = list(self._loads.values())
        self._loads.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _load(self, key: tuple[str, str]) -> asyncio.Task[ModelTokenizer]:
        task = asyncio.create_task(asyncio.to_thread(load_tokenizer, Path(key[0])), name=f"tokenizer {key[0]}")
        task.add_done_callback(_log_failure)
        self._loads[key] = task
        return task


def _log_failure(task: asyncio.Task[ModelTokenizer]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if isinstance(error, BadCheckpoint | BlitzError):
        log.warning("cannot load a tokenizer: %s", error)
    elif error is not None:
        log.error("cannot load a tokenizer", exc_info=error)
