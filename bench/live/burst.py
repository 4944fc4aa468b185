"""Sends the prompts over the OpenAI API and notes when first tokens come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from bench.lab.errors import LabFailed
from bench.openai_events import DONE, CompletionRequest, read_event, write_request
from bench.stream_client import Endpoint, StreamClient, StreamFailed

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's answer."""

    ttft_s: float
    """From the start of the burst to the first token's event."""
    text: str
    num_tokens: int

    def same_output(self, other: Answer) -> bool:
        """Whether the tokens are the other's, as far as text and count tell."""
        return (self.text, self.num_tokens) == (other.text, other.num_tokens)


class _Reader:
    """Takes one answer's events."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.pieces: list[str] = []
        self.num_tokens = 0
        self._done = False
        self._error = ""

    @property
    def problem(self) -> str:
        """Why the answer is none; empty if it is whole."""
        return self._error or ("" if self._done else "the stream ended without [DONE]")

    def on_event(self, data: bytes, now_s: float) -> None:
        if data == DONE:
            self._done = True
            return
        try:
            event = read_event(data)
        except msgspec.MsgspecError as error:
            self._error = f"{error} in {data[:200]!r}"
            return
        if event.error is not None:
            self._error = f"{event.error.code}: {event.error.message}"
        if event.usage is not None:
            self.num_tokens = event.usage.completion_tokens
        for choice in event.choices:
            # A token may have no text of its own yet.
            if self.first_s is None and (choice.text or choice.finish_reason is None):
                self.first_s = now_s
            self.pieces.append(choice.text)


class BurstClient:
    """Asks one model of one gateway, greedily and for exactly so many tokens. Close it with ``close``."""

    def __init__(self, url: str, model: str, *, output_tokens: int) -> None:
        self._client = StreamClient(Endpoint.of(url))
        self._model = model
        self._output_tokens = output_tokens

    def close(self) -> None:
        self._client.close()

    async def connect(self, count: int) -> None:
        """Open ``count`` connections, so that the burst does not wait for them. Raises ``LabFailed``."""
        requests = [self._client.request("GET", "/v1/models", timeout_s=_TIMEOUT_S) for _ in range(count)]
        try:
            await asyncio.gather(*requests)
        except StreamFailed as error:
            raise LabFailed(f"the gateway cannot be reached: {error.detail}") from error

    async def ask(self, prompt: tuple[int, ...], *, start_s: float | None = None) -> Answer:
        """One request. ``start_s``: ``perf_counter`` that times count from, by default now.

        Raises ``LabFailed`` unless the answer is whole.
        """
        body = write_request(CompletionRequest.exactly(self._model, prompt, self._output_tokens))
        start_s = time.perf_counter() if start_s is None else start_s
        reader = _Reader()
        try:
            reply = await self._client.request(
                "POST", "/v1/completions", body, on_event=reader.on_event, timeout_s=_TIMEOUT_S
            )
        except StreamFailed as error:
            raise LabFailed(f"a request failed: {error.detail}") from error
        if reply.status != 200:
            raise LabFailed(f"a request was answered with {reply.status}: {reply.body[:300].decode(errors='replace')}")
        if reader.problem:
            raise LabFailed(f"a request failed: {reader.problem}")
        if reader.first_s is None or reader.num_tokens != self._output_tokens:
            raise LabFailed(f"a request gave {reader.num_tokens} tokens, not {self._output_tokens}")
        return Answer(reader.first_s - start_s, "".join(reader.pieces), reader.num_tokens)

    async def alone(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Answer, ...]:
        """One prompt after the other."""
        return tuple([await self.ask(prompt) for prompt in prompts])

    def burst(self, prompts: Sequence[tuple[int, ...]]) -> list[asyncio.Task[Answer]]:
        """All at once: the tasks, in the order of sending."""
        start_s = time.perf_counter()
        return [asyncio.create_task(self.ask(prompt, start_s=start_s)) for prompt in prompts]
