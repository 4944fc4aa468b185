"""Reads a checkpoint before it is registered; a large one in a process of its own, so that hashing holds nothing up.

``python -m services.pool.inspection DIRECTORY [ENGINE]`` prints the model's record, or the error, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shared.checkpoint import (
    CONFIG_FILE,
    IDENTITY_FILES,
    INDEX_FILE,
    Checkpoint,
    check_file,
    inspect_checkpoint,
    is_file,
    parse_json,
    read_file,
)
from shared.errors import BadCheckpoint, BlitzError, DeadlineExceeded, InProgress, Internal, Overloaded, Unavailable
from shared.messages.common import ErrorInfo
from shared.messages.registry import FileDigest, ModelRecord
from shared.model_spec import GenericSpec
from shared.safetensors_header import header_bytes

MAX_AT_ONCE = 2
TIMEOUT_S = 900.0
ANSWER_S = 20.0
"""Callers get an answer within this time: NATS does not let a service answer much later."""
KEEP_S = 2.0
MAX_WAITING = 64
MAX_KEPT = 4096
SMALL_BYTES = 64 * 1024 * 1024
"""Reading this much takes less time than starting a process."""
SMALL_JSON_BYTES = 1024 * 1024
"""The same of JSON, which holds up all threads of its process."""
MAX_ERROR = 2000
"""Characters of an error: what it quotes may be of any size."""
MAX_ANSWER_BYTES = 1 << 20
REFUSED = 3
"""Exit status of a process that found no checkpoint that can be served."""

_Asked = tuple[Path, str]
"""A checkpoint, and the engine that is to serve it."""


class Inspections:
    """A few at a time; the others wait. All callers that ask for the same checkpoint get the same finding."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._running: set[asyncio.subprocess.Process] = set()
        self._asked: dict[_Asked, asyncio.Task[ModelRecord]] = {}

    async def inspect(self, path: Path, engine: str = "", *, wait_s: float = ANSWER_S) -> ModelRecord:
        """The checkpoint's record, for that engine, without a name yet.

        Raises ``BadCheckpoint``; ``InProgress`` if it takes longer than ``wait_s``, after which it goes on for whoever
        asks again; ``DeadlineExceeded`` after ``TIMEOUT_S``; ``Overloaded`` if too many wait."""
        asked = path, engine
        task = self._asked.get(asked)
        if task is None:
            # Without findings that are only kept for callers that ask again.
            waiting = sum(not other.done() for other in self._asked.values())
            if waiting >= MAX_WAITING or len(self._asked) >= MAX_KEPT:
                raise Overloaded(f"{waiting} checkpoints are being read: ask again later", retry_after_s=1.0)
            task = self._asked[asked] = asyncio.create_task(self._inspect(path, engine))
            task.add_done_callback(lambda done: self._forget(asked, done))
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise InProgress(f"{path} is still being read: ask again", retry_after_s=1.0) from error
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise Unavailable(f"this pool does not lead any more: ask again for {path}", retry_after_s=0.5) from None

    def _forget(self, asked: _Asked, done: asyncio.Task[ModelRecord]) -> None:
        """A finding stays for a moment, for callers that were told to ask again. An error does not: it may be
        mended."""
        if done.cancelled() or done.exception() is not None:
            self._asked.pop(asked, None)
        else:
            asyncio.get_running_loop().call_later(KEEP_S, self._asked.pop, asked, None)

    async def _inspect(self, path: Path, engine: str) -> ModelRecord:
        async with self._turns:
            if await asyncio.to_thread(_is_small, path):
                return await asyncio.to_thread(_inspect, path, engine)
            return await self._inspect_apart(path, engine)

    async def close(self) -> None:
        """End what runs."""
        for task in self._asked.values():
            task.cancel()
        for process in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _inspect_apart(self, path: Path, engine: str) -> ModelRecord:
        command = (sys.executable, "-m", "services.pool.inspection", str(path), engine)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, limit=MAX_ANSWER_BYTES
        )
        self._running.add(process)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output, _ = await process.communicate()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{path} was not read within {TIMEOUT_S:g} s") from error
        finally:
            self._running.discard(process)
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        try:
            if process.returncode == REFUSED:
                raise msgspec.json.decode(output, type=ErrorInfo).as_error()
            return msgspec.json.decode(output, type=ModelRecord)
        except msgspec.MsgspecError as error:
            raise Internal(f"reading {path} ended with status {process.returncode}") from error


def _is_small(path: Path) -> bool:
    try:
        weights = [(file, file.stat().st_size) for file in path.glob("*.safetensors") if is_file(file)]
        files = [path / name for name in (*IDENTITY_FILES, INDEX_FILE)]
        json_bytes = sum(file.stat().st_size for file in files if is_file(file))
        json_bytes += sum(min(num_bytes, header_bytes(file)) for file, num_bytes in weights)
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read: {error.strerror}") from error
    return sum(num_bytes for _, num_bytes in weights) <= SMALL_BYTES and json_bytes <= SMALL_JSON_BYTES


def _inspect(path: Path, engine: str = "") -> ModelRecord:
    try:
        checkpoint = inspect_checkpoint(path, generic=bool(engine))
        if engine:
            _refuse_own_code(path, checkpoint.files)
    except BadCheckpoint as error:
        if len(error.message) <= MAX_ERROR:
            raise
        raise BadCheckpoint(f"{error.message[:MAX_ERROR]}…") from None
    return record_of(checkpoint, engine)


def record_of(checkpoint: Checkpoint, engine: str) -> ModelRecord:
    """Of a checkpoint with its hash, that the engine of this name serves; without a name for people."""
    layout = checkpoint.layout
    return ModelRecord(
        name="",
        path=str(checkpoint.path),
        model_hash=checkpoint.model_hash,
        layout_hash=layout.hash,
        spec=None if layout.is_generic else layout.spec,
        generic=layout.of if isinstance(layout.of, GenericSpec) else None,
        weights_bytes=layout.num_bytes,
        added_at_s=0.0,
        unit_digests=checkpoint.unit_digests,
        files=checkpoint.files,
        engine=engine,
    )


def _refuse_own_code(path: Path, files: Iterable[FileDigest]) -> None:
    """Engines of others read the whole ``config.json``; of code that a checkpoint brings, none is to hear, and of no
    other directory."""
    content = read_file(path / CONFIG_FILE)
    check_file(files, path / CONFIG_FILE, content)
    config = parse_json(path / CONFIG_FILE, content)
    if config.get("configuration_files") is not None:
        raise BadCheckpoint(
            f"{CONFIG_FILE}: configuration_files names other files, of which one would be read: remove it"
        )
    if config.get("auto_map"):
        raise BadCheckpoint(
            f"{CONFIG_FILE}: auto_map names code of the checkpoint's own, which an engine of others may run: remove it"
        )
    if config.get("speculators_config") is not None:
        raise BadCheckpoint(f"{CONFIG_FILE}: speculators_config names another model, from elsewhere: register that one")


def main() -> int:
    found: ModelRecord | ErrorInfo
    try:
        found = _inspect(Path(sys.argv[1]), *sys.argv[2:3])
    except BlitzError as error:
        found = ErrorInfo.of(error)
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0 if isinstance(found, ModelRecord) else REFUSED


if __name__ == "__main__":
    sys.exit(main())
