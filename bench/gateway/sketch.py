"""The reference that the gateway is compared with: FastAPI, NATS and a token producer, and nothing else.

No admission, no tokenizer, no offsets, no recovery: two processes that move the same number of
tokens over the same path, so that one run gives both figures.

    python -m bench.gateway.sketch app NATS_URL PORT
    python -m bench.gateway.sketch producer NATS_URL
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import nats
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from nats.aio.msg import Msg

SUBMIT = "sketch.submit"
TOKENS = "sketch.tokens"
_WORDS = tuple(f" w{index}" for index in range(256))


class _Job(msgspec.Struct, frozen=True, array_like=True):
    id: int
    max_tokens: int


class _Token(msgspec.Struct, frozen=True, array_like=True):
    id: int
    token_id: int
    last: bool


def make_app(nats_url: str) -> FastAPI:
    """The endpoint: one queue per stream, one message per step of the producer."""
    queues: dict[int, asyncio.Queue[_Token]] = {}
    ids = itertools.count()
    decoder = msgspec.msgpack.Decoder(list[_Token])

    async def on_tokens(message: Msg) -> None:
        for token in decoder.decode(message.data):
            queue = queues.get(token.id)
            if queue is not None:
                queue.put_nowait(token)

    @asynccontextmanager
    async def connected(app: FastAPI) -> AsyncIterator[None]:
        app.state.bus = await nats.connect(nats_url)
        await app.state.bus.subscribe(TOKENS, cb=on_tokens)
        yield
        await app.state.bus.close()

    app = FastAPI(lifespan=connected)

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": "sketch", "object": "model"}]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = msgspec.json.decode(await request.body())
        job = _Job(next(ids), body["max_tokens"])
        queue = queues[job.id] = asyncio.Queue()
        await app.state.bus.publish(SUBMIT, msgspec.msgpack.encode(job))

        async def events() -> AsyncIterator[bytes]:
            try:
                last = False
                while not last:
                    token = await queue.get()
                    last = token.last
                    choice = {"index": 0, "text": _WORDS[token.token_id], "finish_reason": "length" if last else None}
                    event = {"id": job.id, "object": "text_completion", "model": "sketch", "choices": [choice]}
                    yield b"data: " + msgspec.json.encode(event) + b"\n\n"
                yield b"data: [DONE]\n\n"
            finally:
                del queues[job.id]

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


async def produce(nats_url: str) -> None:
    """One token per running job and step, one message per step, as fast as it goes."""
    bus = await nats.connect(nats_url)
    left: dict[int, int] = {}
    wake = asyncio.Event()

    async def on_job(message: Msg) -> None:
        job = msgspec.msgpack.decode(message.data, type=_Job)
        left[job.id] = job.max_tokens
        wake.set()

    await bus.subscribe(SUBMIT, cb=on_job)
    await bus.flush()
    print("ready", flush=True)  # noqa: T201 - a job that comes before this is lost
    encoder = msgspec.msgpack.Encoder()
    while True:
        if not left:
            wake.clear()
            await wake.wait()
        step = [_Token(id_, remaining % 256, remaining == 1) for id_, remaining in left.items()]
        await bus.publish(TOKENS, encoder.encode(step))
        # Wait until the server has it: unbounded buffers would be no fair reference.
        await bus.flush()
        for token in step:
            left[token.id] -= 1
            if token.last:
                del left[token.id]


def main(arguments: list[str]) -> None:
    """Run one of the two processes."""
    if arguments[0] == "app":
        uvicorn.run(
            make_app(arguments[1]),
            host="127.0.0.1",
            port=int(arguments[2]),
            loop="uvloop",
            http="httptools",
            log_level="warning",
            access_log=False,
        )
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(produce(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
