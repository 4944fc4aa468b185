"""The API keys that this gateway accepts, their limits (shared with the other gateways), and their counters."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace

from prometheus_client.core import Metric

from services.gateway.core.key_limits import Charge, KeyLimits, LimitStatus, pages
from services.gateway.core.stream import StreamState
from services.gateway.errors import Forbidden
from services.gateway.key_file import ApiKey, digest, read_keys
from services.gateway.metrics import counter_family, gauge_family
from services.gateway.request_bodies.options import Options
from services.gateway.watched_file import WatchedFile
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, RateLimitExceeded
from shared.messages.load import KeyUsageReport

log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.1
ROWS_PER_REPORT = 1000
"""Of at most some 250 bytes each: well under 1 MB."""
MAX_LABELS = 200
"""Keys with series of their own in the metrics; the others, and those that are gone, are summed up as ``other``."""
MAX_PAIRS = 2000
"""Of a key and a model, with a series of their own."""
LEAST_OPEN_TOKENS = 256
"""Of output, if the caller leaves the length open: with less left, a key waits rather than get a stump."""
OTHER = "other"
SHARED = "*"
"""No key has this name."""


class ApiKeys:
    """For the event loop only, except ``families``."""

    def __init__(
        self,
        plain: Sequence[str],
        path: str,
        *,
        gateway_id: str,
        incarnation: str,
        models: Container[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``plain`` keys have no limits; ``path``, unless empty, is the file of others. ``models``: the names of those
        that are registered, at any time. Raises ``SettingsError``."""
        self._models = models
        self._gateway_id = gateway_id
        self._incarnation = incarnation
        self._clock = clock
        self._plain = {digest(key.encode()): ApiKey(f"env:{number}") for number, key in enumerate(plain, 1)}
        self._keys: dict[bytes, ApiKey] = {}
        self._by_name: dict[str, ApiKey] = {}
        self._limits = KeyLimits(gateway_id)
        self._labels: set[str] = set()
        self._requests: Counter[str] = Counter()
        self._limited: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        """By key and model."""
        self._apply({})
        self._file = WatchedFile(path, read_keys, self._apply, "API keys and limits") if path else None

    @property
    def required(self) -> bool:
        """Whether a key must be shown at all."""
        return self._file is not None or bool(self._plain)

    def find(self, shown: bytes) -> ApiKey | None:
        """The key that was shown, if it is accepted."""
        # By digest: the time that this takes reveals nothing about the keys and does not grow with their number.
        return self._keys.get(digest(shown))

    def may_use(self, name: str, model: str) -> bool:
        """Whether the key of that name may use a model."""
        key = self._by_name.get(name)
        return key is None or key.models is None or model in key.models

    def owner_of_prefixes(self, name: str) -> str:
        """With whose requests the key of that name shares KV: the same for two keys that do."""
        key = self._by_name.get(name)
        return SHARED if key is not None and key.shares_prefixes else name

    def check_model(self, name: str, model: str) -> None:
        """Raises ``Forbidden`` when the key of that name may not use the model."""
        if not self.may_use(name, model):
            raise Forbidden(f"key {name!r} may not use model {model!r}", param="model")

    def check(self, name: str) -> None:
        """Before a request is read: raises ``RateLimitExceeded`` when the key could not make the smallest one."""
        with self._counting_refusals(name):
            self._limits.check(name, self._clock())

    @contextlib.contextmanager
    def bill(self, name: str) -> Iterator[Bill]:
        """Of one request: what its key is charged with, and pays in the end."""
        bill = Bill(self, name)
        try:
            yield bill
        finally:
            bill.settle()

    def output_tokens(self, name: str, prompts: Sequence[Sequence[int]], least: int) -> int | None:
        """The longest output to allow where the caller does not say; None means unlimited. ``least``: what the caller
        needs."""
        least = max(least, LEAST_OPEN_TOKENS)
        tokens = sum(map(len, prompts))
        return self._limits.open_tokens(name, self._clock(), prompt_tokens=tokens, outputs=len(prompts), least=least)

    def charge(self, name: str, streams: Sequence[StreamState]) -> Charge | None:
        """Admit a request. Raises ``RateLimitExceeded``, ``BadRequest``; then nothing is charged."""
        tokens = sum(stream.num_context_tokens for stream in streams)
        with self._counting_refusals(name):
            charge = self._limits.charge(name, self._clock(), requests=len(streams), tokens=tokens)
        self._requests[self._label(name)] += len(streams)
        return charge

    def settle(self, name: str, model: str, charge: Charge | None, used_tokens: int) -> None:
        """An admitted request has ended."""
        self._tokens[self._pair(name, model)] += used_tokens
        if charge is not None:
            self._limits.settle(charge, used_tokens, self._clock())

    def headers(self, name: str) -> list[tuple[bytes, bytes]]:
        """``x-ratelimit-*`` of the key now, as OpenAI has them."""
        rows: list[tuple[bytes, bytes]] = []
        for what, status in zip((b"requests", b"tokens"), self._limits.status(name, self._clock()), strict=True):
            if status is not None:
                rows += _headers(what, status)
        return rows

    async def run(self, bus: Bus) -> None:
        """Report to the other gateways, take their reports, and read the file when it changes, until cancelled."""
        subscription = await bus.subscribe(subjects.key_usage(), KeyUsageReport, self._on_usage)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._report(bus))
                if self._file is not None:
                    tasks.create_task(self._file.watch())
        finally:
            await subscription.close()

    def families(self) -> Iterator[Metric]:
        """What was counted."""
        yield counter_family(
            "blitz_gateway_key_requests",
            "Requests admitted, by the key's name; keys after the first 200 are summed up as other.",
            ["key"],
            self._requests,
        )
        yield counter_family(
            "blitz_gateway_key_limited",
            "Requests refused with rate_limit_exceeded; limit: requests, tokens, concurrent.",
            ["key", "limit"],
            self._limited,
        )
        yield counter_family(
            "blitz_gateway_key_tokens",
            "Prompt and output tokens used, by the key's name and the model; beyond the first 2,000 pairs, those of a "
            "model are summed up with the key other.",
            ["key", "model_name"],
            self._tokens,
        )
        yield gauge_family(
            "blitz_gateway_key_open_requests",
            "Open requests of limited keys at this gateway.",
            ["key"],
            {label: self._limits.open_requests(label) for label in set(self._labels)},
        )
        file = self._file
        reads = {"ok": file.num_good if file is not None else 0, "bad": file.num_bad if file is not None else 0}
        yield counter_family(
            "blitz_gateway_key_file_reads", "Times that the keys file was read: ok, bad.", ["outcome"], reads
        )

    async def look(self) -> None:
        """Read the file if it has changed. A bad one changes nothing, and is logged."""
        if self._file is not None:
            await self._file.look()

    def _apply(self, keys: dict[bytes, ApiKey]) -> None:
        self._keys = {**self._plain, **keys}
        self._by_name = {key.name: key for key in self._keys.values()}
        for gone in self._labels - self._by_name.keys():
            self._labels.remove(gone)
            self._requests.pop(gone, None)
            for pair in [pair for pair in self._tokens if pair[0] == gone]:
                del self._tokens[pair]
        for row in [row for row in self._limited if row[0] not in (OTHER, *self._labels)]:
            del self._limited[row]
        self._limits.set_limits({key.name: key.limits for key in keys.values()}, self._clock())

    def forget_model(self, model: str) -> None:
        """The model is registered no more: what was counted of it goes with it."""
        for pair in [pair for pair in self._tokens if pair[1] == model]:
            del self._tokens[pair]

    def _label(self, name: str) -> str:
        if name not in self._labels:
            # The last requests of a key that is gone are not to make a series that nobody ends.
            if name not in self._by_name or len(self._labels) >= MAX_LABELS:
                return OTHER
            self._labels.add(name)
        return name

    def _pair(self, name: str, model: str) -> tuple[str, str]:
        if model not in self._models:
            return OTHER, OTHER
        pair = self._label(name), model
        return pair if pair in self._tokens or len(self._tokens) < MAX_PAIRS else (OTHER, model)

    @contextlib.contextmanager
    def _counting_refusals(self, name: str) -> Iterator[None]:
        try:
            yield
        except RateLimitExceeded as error:
            self._limited[self._label(name), error.limit] += 1
            raise

    def _on_usage(self, report: KeyUsageReport) -> None:
        self._limits.take(report, self._clock())

    async def _report(self, bus: Bus) -> None:
        while True:
            for rows in pages(self._limits.usage(self._clock()), ROWS_PER_REPORT):
                message = KeyUsageReport(
                    gateway_id=self._gateway_id,
                    incarnation=self._incarnation,
                    keys=rows,
                )
                try:
                    await bus.publish(subjects.key_usage(), message)
                except BlitzError as error:
                    # Reports carry totals, so the next one makes up for this one.
                    log.debug("usage of keys not published: %s", error)
            await asyncio.sleep(REPORT_EVERY_S)


class Bill:
    """What one request costs its key."""

    __slots__ = ("_charge", "_keys", "_streams", "key")

    def __init__(self, keys: ApiKeys, key: str) -> None:
        self._keys = keys
        self.key = key
        """Its name; empty where no key is needed."""
        self._streams: Sequence[StreamState] = ()
        self._charge: Charge | None = None

    def limited(self, options: Options, prompts: Sequence[Sequence[int]]) -> Options:
        """An open length of the output, within what the key may use."""
        if options.max_tokens is not None:
            return options
        most = self._keys.output_tokens(self.key, prompts, options.sampling.min_tokens)
        if most is None:
            return options
        default = options.default_max_tokens
        return replace(options, default_max_tokens=most if default is None else min(default, most))

    def charge(self, streams: Sequence[StreamState]) -> None:
        """Admit these. Raises as ``ApiKeys.charge``."""
        if self.key:
            self._charge = self._keys.charge(self.key, streams)
            self._streams = streams

    def settle(self) -> None:
        """The request is over."""
        if self._streams:
            # A request that no instance ever got has used nothing.
            used = sum(stream.num_known_tokens for stream in self._streams if stream.attempt)
            self._keys.settle(self.key, self._streams[0].model, self._charge, used)


def _headers(what: bytes, status: LimitStatus) -> list[tuple[bytes, bytes]]:
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % status.limit),
        (b"x-ratelimit-remaining-" + what, b"%d" % status.remaining),
        (b"x-ratelimit-reset-" + what, shown_duration(status.full_in_s).encode()),
    ]


def shown_duration(seconds: float) -> str:
    """As OpenAI writes them: ``12ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"
