"""Memory that clients can make the gateway use, counted and bounded over all of them together.

Requests claim their share of a ``ByteBudget``; one that does not fit is refused. No client (its key, or its address
without one) occupies more than it leaves free for the others.

Tokens arrive as fast as the engine makes them, and a client reads them as fast as it likes. What it has not read is
held in a ``ResponseBuffer``. A client for which too much waits is cut off: its connection is closed, its requests are
cancelled at their workers, and its memory is free at once. If all responses together hold too much, the largest is cut
off first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

from services.gateway.errors import ResponseTooLarge
from shared.errors import BlitzError, Overloaded, Unavailable

log = logging.getLogger(__name__)

MAX_PIECE_BYTES = 64 * 1024
"""The most that is handed to the connection at once, so the most that it holds beyond its own high-water mark."""

Reason = Literal["slow_reader", "memory"]


class ResponseMemory:
    """The buffers of all responses, and the bytes that they hold."""

    def __init__(
        self, *, total_bytes: int, slow_bytes: int, whole_bytes: int, on_cut: Callable[[Reason], None]
    ) -> None:
        self.total_bytes = total_bytes
        self.slow_bytes = slow_bytes
        """What may wait of one streamed response for a client that does not read."""
        self.whole_bytes = whole_bytes
        """What may be collected of one response that is not streamed."""
        self.used_bytes = 0
        self._buffers: set[ResponseBuffer] = set()
        self._on_cut = on_cut

    def open(self, response_id: str, num_choices: int, abort: Callable[[], None]) -> ResponseBuffer:
        """A buffer for one response. ``abort`` closes the client's connection and drops what it has not read."""
        buffer = ResponseBuffer(self, response_id, num_choices, abort)
        self._buffers.add(buffer)
        return buffer

    def forget(self, buffer: ResponseBuffer) -> None:
        """The response is over."""
        self._buffers.discard(buffer)

    def cut(self, buffer: ResponseBuffer, reason: Reason, words: str) -> None:
        """End a response that holds too much."""
        log.warning("response %s: cut off (%s): %s", buffer.response_id, reason, words)
        self._on_cut(reason)
        buffer.cut_off()

    def relieve(self) -> None:
        """Cut off the largest until all others fit."""
        while self.used_bytes > self.total_bytes and self._buffers:
            largest = max(self._buffers, key=lambda buffer: buffer.held_bytes)
            held = f"it holds {largest.held_bytes} bytes; all together may hold {self.total_bytes}"
            if largest.begun:
                self.cut(largest, "memory", held)
            else:
                self._on_cut("memory")
                largest.fail(Unavailable(f"responses occupy all the memory that they may: {held}", retry_after_s=1.0))
                # It ends within a turn of the event loop, and what it has collected goes with it.
                largest.sent(largest.held_bytes)
            self.forget(largest)


class ResponseBuffer:
    """Between sinks, which write inline, and the one task that sends to the client."""

    def __init__(self, memory: ResponseMemory, response_id: str, num_choices: int, abort: Callable[[], None]) -> None:
        self._memory = memory
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._chunks: deque[bytes] = deque()
        self.response_id = response_id
        self.open_choices = num_choices
        self.error: BlitzError | None = None
        self.disconnected = False
        self.begun = False
        """The client has a status and headers: an error can no longer take their place."""
        self.sending = False
        """The sending task is waiting for the client to read."""
        self.held_bytes = 0
        self._slow_bytes = memory.slow_bytes
        """What may be held of a stream while the client is to read: what is kept for its end is not the client's."""
        self._kept_bytes = 0

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.disconnected or self.error is not None or self.open_choices == 0

    @property
    def has_chunks(self) -> bool:
        """Whether something is to be sent."""
        return bool(self._chunks)

    def write(self, chunk: bytes) -> None:
        """Something for the client. Dropped when that is gone."""
        if self.disconnected or not chunk:
            return
        self._chunks.append(chunk)
        memory = self._memory
        self.held_bytes += len(chunk)
        memory.used_bytes += len(chunk)
        # What waits between two turns of the event loop says nothing about the client.
        if self.sending and self.held_bytes > self._slow_bytes:
            waiting = self.held_bytes - self._kept_bytes
            memory.cut(self, "slow_reader", f"{waiting} bytes wait, at most {memory.slow_bytes} may")
        elif memory.used_bytes > memory.total_bytes:
            memory.relieve()

    def collect(self, num_bytes: int) -> None:
        """Count bytes that are kept elsewhere, for an answer that is sent whole."""
        if self.error is not None:
            return
        memory = self._memory
        self.held_bytes += num_bytes
        memory.used_bytes += num_bytes
        if self.held_bytes > memory.whole_bytes:
            self.fail(
                ResponseTooLarge(
                    f"the answer occupies more than {memory.whole_bytes} bytes; ask for it with stream, "
                    "for less of it, or for fewer log-probabilities",
                )
            )
        elif memory.used_bytes > memory.total_bytes:
            memory.relieve()

    def keep(self, num_bytes: int) -> None:
        """Count bytes that are kept elsewhere until the end of an answer that is streamed."""
        if self.error is not None or self.disconnected:
            return
        memory = self._memory
        self._kept_bytes += num_bytes
        self._slow_bytes += num_bytes
        self.held_bytes += num_bytes
        memory.used_bytes += num_bytes
        if self._kept_bytes > memory.whole_bytes:
            self.fail(
                ResponseTooLarge(
                    f"the answer occupies more than {memory.whole_bytes} bytes that are kept until its end; "
                    "ask for less of it"
                )
            )
        elif memory.used_bytes > memory.total_bytes:
            memory.relieve()

    def take(self) -> bytes:
        """The next piece to send: all chunks that fit one, at least one. It counts as held until ``sent``."""
        chunks = self._chunks
        if len(chunks) == 1:
            return chunks.popleft()
        piece = [chunks.popleft()]
        size = len(piece[0])
        while chunks and size + len(chunks[0]) <= MAX_PIECE_BYTES:
            size += len(chunks[0])
            piece.append(chunks.popleft())
        return b"".join(piece)

    def sent(self, num_bytes: int) -> None:
        """The client, or the kernel for it, has taken that much."""
        # After a cut nothing is held any more.
        num_bytes = min(num_bytes, self.held_bytes)
        self.held_bytes -= num_bytes
        self._memory.used_bytes -= num_bytes

    def wake(self) -> None:
        """Let the sending task look again."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: BlitzError) -> None:
        """End with an error; the first one counts."""
        if self.error is None:
            self.error = error
        self.wake()

    def disconnect(self) -> None:
        """The client is gone."""
        self.disconnected = True
        self.wake()

    def cut_off(self) -> None:
        """Drop the client, and what it has not read."""
        self._chunks.clear()
        self.sent(self.held_bytes)
        self._abort()
        self.disconnect()

    async def wait(self) -> None:
        """Wait until there are chunks, or the response has ended."""
        while not self._chunks and not self.over:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._waiter = None

    def close(self) -> None:
        """The response is over."""
        self._chunks.clear()
        self.sent(self.held_bytes)
        self._memory.forget(self)


RETRY_AFTER_S = 1.0


class ByteBudget:
    """Bytes that many users take for one purpose. Everything runs on the event loop."""

    def __init__(self, limit_bytes: int, what: str) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._what = what
        self._of_clients: dict[str, int] = {}

    @contextlib.contextmanager
    def claim(self, client: str) -> Iterator[MemoryClaim]:
        """A share, empty at first, given back at the end. ``client``: who it is counted with, as an error says it."""
        claim = MemoryClaim(self, client)
        try:
            yield claim
        finally:
            claim.resize(0)

    def _take(self, client: str, num_bytes: int) -> None:
        used = self.used_bytes + num_bytes
        mine = self._of_clients.get(client, 0) + num_bytes
        if num_bytes > 0 and used > self.limit_bytes:
            raise Overloaded(
                f"{self._what} here occupy {self.used_bytes} bytes of memory; with {num_bytes} more they would exceed "
                f"the {self.limit_bytes} that they may occupy; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        if num_bytes > 0 and mine > self.limit_bytes - used:
            raise Overloaded(
                f"{self._what} of {client} would occupy {mine} bytes of memory, more than the "
                f"{self.limit_bytes - used} that they would leave for others; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self.used_bytes = used
        self._of_clients[client] = mine
        if not mine:
            del self._of_clients[client]


class MemoryClaim:
    """One request's share of a budget."""

    __slots__ = ("_budget", "_client", "num_bytes")

    def __init__(self, budget: ByteBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self.num_bytes = 0

    def resize(self, num_bytes: int) -> None:
        """Take more or give back. Raises ``Overloaded`` when the budget, or the client's part of it, is used up; then
        the share stays as it was."""
        self._budget._take(self._client, num_bytes - self.num_bytes)
        self.num_bytes = num_bytes
