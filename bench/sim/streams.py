"""Requests as gateways and instances know each other's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import BlitzError
from shared.messages.generation import DecodePlace, SamplingParams
from shared.subjects import Process


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


Key = tuple[str, int]
"""An attempt of a request: its id, and the attempt's number."""


class Listener(Protocol):
    """Who is told of attempts (``bench.sim.gateway.SimGateway``); also of those that it has given up."""

    def on_tokens(self, keys: Sequence[Key], ends_s: Sequence[float], *, worker: Process, instance_id: str) -> None:
        """Each of these got a token at each of these times."""

    def on_taken_over(self, key: Key, *, worker: Process, instance_id: str) -> None:
        """Another instance decodes it from here on."""

    def on_end(self, key: Key) -> None:
        """It has all its tokens."""

    def on_failed(self, key: Key, error: BlitzError) -> None:
        """It has ended without its tokens."""


def sequence_of(stream: Stream, decode_at: DecodePlace | None) -> ActiveSequence:
    """A request as a scheduler takes it. Which tokens it has matters to nobody."""
    return ActiveSequence(
        request_id=stream.request_id,
        attempt=stream.attempt,
        gateway_id="",
        prompt=(0,) * len(stream.prompt_token_ids),
        params=stream.sampling,
        output=[0] * len(stream.output_token_ids),
        decode_at=decode_at,
    )
