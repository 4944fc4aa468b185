"""``python -m blitz_vllm SOCKET PID``: serve the worker that listens there and has this id, until it goes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback

from . import plugin, words
from .front import MAX_UNREAD_BYTES, ConfigurationRefused, Front, imported


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's data; None at the end."""
    try:
        length = words.length_of(await reader.readexactly(words.LENGTH_BYTES))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def _serve(path: str) -> int:
    reader, writer = await asyncio.open_unix_connection(path)

    def say(word: object) -> None:
        if writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            os._exit(1)
        writer.write(words.frame(word))  # type: ignore[arg-type]

    front = Front(say)
    try:
        said = imported()
        say(said)
        await writer.drain()
        if said.lacks:
            return 1
        data = await _read(reader)
        if data is None:
            return 0
        start = words.to_process.decode(data)
        if not isinstance(start, words.Start):
            raise TypeError(f"{type(start).__name__} before Start")
        say(front.start(start))
    except Exception as error:  # noqa: BLE001 - whatever it is, the worker has to hear of it
        is_final = isinstance(error, ConfigurationRefused)
        reason = str(error) if is_final else f"{type(error).__name__}: {error}"
        say(words.Failed(reason=reason[:4000], is_final=is_final))
        await writer.drain()
        front.close()
        return 1
    tasks = {asyncio.create_task(front.watch()), asyncio.create_task(_take(reader, front))}
    saying = asyncio.create_task(front.say_load_forever())
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    saying.cancel()
    for task in done:
        task.result()
    await asyncio.wait({asyncio.ensure_future(writer.drain())}, timeout=1.0)
    front.close()
    return 0


async def _take(reader: asyncio.StreamReader, front: Front) -> None:
    """Until the worker goes."""
    while (data := await _read(reader)) is not None:
        word = words.to_process.decode(data)
        if isinstance(word, words.Add):
            front.add(word)
        elif isinstance(word, words.Leave):
            front.cancel(word)
        elif isinstance(word, words.Refill):
            await front.fill(word)  # requests come behind it
        elif isinstance(word, words.FinishRefill):
            front.finish()
        elif isinstance(word, words.AskWell):
            front.answer()


def main() -> None:
    """Ends with everything that it has started."""
    plugin.forks_die_with_parents()
    # It may import, or start, for minutes before it sees that the connection has ended.
    plugin.die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for all: the worker says when
    status = 1
    try:
        status = asyncio.run(_serve(sys.argv[1]))
    except Exception:  # noqa: BLE001 - whatever it is, the worker shows the end of what is written here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
