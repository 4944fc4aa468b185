"""Requests as gateways and instances know each other's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.worker.core.scheduling.sequence import Sequence as Request
from shared.errors import BlitzError
from shared.messages.generation import DecodePlace, SamplingParams


class Stream(Protocol):
    """A request as its gateway knows it (``services.gateway.core.stream.StreamState``)."""

    @property
    def request_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def output_token_ids(self) -> Sequence[int]: ...


class Listener(Protocol):
    """Who is told of requests (``bench.sim.gateway.SimGateway``). Of an attempt that was given up nothing is told."""

    def on_tokens(
        self, request_ids: Sequence[str], ends_s: Sequence[float], *, worker_id: str, instance_id: str
    ) -> None:
        """Each of these got a token at each of these times."""

    def on_taken_over(self, request_id: str, *, worker_id: str, instance_id: str) -> None:
        """Another instance decodes it from here on."""

    def on_end(self, request_id: str) -> None:
        """It has all its tokens."""

    def on_failed(self, request_id: str, error: BlitzError) -> None:
        """Its attempt has ended without its tokens."""


def sequence_of(stream: Stream, decode_at: DecodePlace | None) -> Request:
    """A request as a scheduler takes it. Which tokens it has matters to nobody."""
    return Request(
        request_id=stream.request_id,
        attempt=stream.attempt,
        gateway_id="",
        prompt=(0,) * len(stream.prompt_token_ids),
        params=stream.sampling,
        output=[0] * len(stream.output_token_ids),
        decode_at=decode_at,
    )
