"""What each API key may use, and has used: requests and tokens per minute, concurrent requests.

Rules
- Requests and tokens are buckets that hold a minute's worth and fill evenly. A request takes its tokens, prompt and
  ``max_tokens``, when it is admitted; what it did not use is returned at its end.
- Every gateway has every bucket. Each tells the others its total spending, and subtracts what they report. So one
  gateway may admit, at most, what the others admit between two reports (0.1 s) beyond what is left. The bucket is
  then below zero, and this is paid back before any further request is admitted.
- A gateway that hears of another one for the first time assumes no more left than that one has.
- A charge stands even if the limits change afterwards; the requests of a removed key end without an account.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shared.errors import BadRequest, RateLimitExceeded
from shared.messages.load import KeyUsage, KeyUsageReport

MINUTE_S = 60.0
REPEAT_S = 1.0
"""A key's usage is reported for this long after it has changed, because a report may be lost."""
FRESH_S = 2.0
"""Requests that another gateway has open count as long as it reports them at least this often."""
FORGET_S = 120.0
MAX_GATEWAYS = 1000
MAX_WAIT_S = 60.0
MAX_DEBT_MINUTES = 60.0
"""What all gateways together can have admitted too much is far below, and no message shuts a key out for longer."""
DURATION_WEIGHT = 0.2
"""Weight of the newest request in the average duration."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one key; None means unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """One limit of a key now."""

    limit: int
    remaining: int
    full_in_s: float
    """Until nothing of it is used."""


@dataclass(slots=True)
class Bucket:
    """Holds ``capacity`` and fills in a minute. Below zero: more was spent than it held."""

    capacity: float
    at_s: float
    level: float = field(init=False)

    def __post_init__(self) -> None:
        self.level = self.capacity

    def left(self, now_s: float) -> float:
        """What it holds now."""
        self.level = min(self.capacity, self.level + max(0.0, now_s - self.at_s) * self.capacity / MINUTE_S)
        self.at_s = max(self.at_s, now_s)
        return self.level

    def spend(self, amount: float, now_s: float) -> None:
        """Take an amount out, or put a negative one back."""
        self.level = max(-MAX_DEBT_MINUTES * self.capacity, min(self.capacity, self.left(now_s) - amount))

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until it holds ``amount``; 0 if it does."""
        return max(0.0, (amount - self.left(now_s)) * MINUTE_S / self.capacity)

    def resize(self, capacity: float, now_s: float) -> None:
        """Change the limit; what is spent stays spent."""
        self.level = min(capacity, self.left(now_s) + capacity - self.capacity)
        self.capacity = capacity

    def status(self, now_s: float) -> LimitStatus:
        """As a client sees it."""
        left = self.left(now_s)
        return LimitStatus(int(self.capacity), max(0, int(left)), (self.capacity - left) * MINUTE_S / self.capacity)


@dataclass(slots=True)
class _Key:
    limits: Limits
    requests: Bucket | None = None
    tokens: Bucket | None = None
    concurrent: int = 0
    elsewhere: dict[str, tuple[float, int]] = field(default_factory=dict)
    """By gateway: when it told, and how many requests it has open."""
    requests_total: int = 0
    tokens_total: int = 0
    told_until_s: float = 0.0
    duration_s: float = 1.0

    def open_requests(self, now_s: float) -> int:
        """Here and elsewhere."""
        self.elsewhere = {name: row for name, row in self.elsewhere.items() if now_s - row[0] <= FRESH_S}
        return self.concurrent + sum(count for _, count in self.elsewhere.values())


@dataclass(slots=True)
class _Gateway:
    incarnation: str
    heard_s: float
    rows: dict[str, KeyUsage] = field(default_factory=dict)


@dataclass(slots=True)
class Charge:
    """What one request was admitted with."""

    key: str
    requests: int
    tokens: int
    at_s: float


class KeyLimits:
    """The buckets of all limited keys. ``now_s`` is monotonic."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._keys: dict[str, _Key] = {}
        self._told: dict[str, None] = {}
        self._others: dict[str, _Gateway] = {}

    def set_limits(self, limits: Mapping[str, Limits], now_s: float) -> None:
        """Replace all keys' limits. Keys that stay keep what they have used."""
        for name in self._keys.keys() - limits.keys():
            del self._keys[name]
            self._told.pop(name, None)
            for other in self._others.values():
                other.rows.pop(name, None)
        for name, new in limits.items():
            key = self._keys.setdefault(name, _Key(new))
            key.limits = new
            key.requests = _bucket(key.requests, new.requests_per_minute, now_s)
            key.tokens = _bucket(key.tokens, new.tokens_per_minute, now_s)

    def check(self, name: str, now_s: float, *, requests: int = 1, tokens: int = 1) -> None:
        """Raises ``RateLimitExceeded`` if the key cannot pay for that now, ``BadRequest`` if it never can."""
        key = self._keys.get(name)
        if key is None:
            return
        limit = key.limits.max_concurrent_requests
        if limit is not None:
            if requests > limit:
                raise BadRequest(
                    f"{requests} prompts are more than the {limit} requests that key {name!r} may have open"
                )
            if key.open_requests(now_s) + requests > limit:
                wait_s = min(MAX_WAIT_S, key.duration_s * requests / limit)
                raise _exceeded(name, "concurrent", f"{limit} requests at a time", wait_s)
        waits = []
        for what, bucket, amount in (("requests", key.requests, requests), ("tokens", key.tokens, tokens)):
            if bucket is None:
                continue
            if amount > bucket.capacity:
                raise BadRequest(
                    f"{amount} {what} (prompt and max_tokens count) are more than the {bucket.capacity:.0f} per minute "
                    f"that key {name!r} may use",
                    param="max_tokens" if what == "tokens" else None,
                )
            wait_s = bucket.wait_s(amount, now_s)
            if wait_s > 0:
                waits.append((wait_s, what, bucket.capacity))
        if waits:
            wait_s, what, capacity = max(waits)
            raise _exceeded(name, what, f"{capacity:.0f} {what} per minute", wait_s)

    def charge(self, name: str, now_s: float, *, requests: int, tokens: int) -> Charge | None:
        """Admit a request, or raise as ``check`` does. None for a key without limits."""
        self.check(name, now_s, requests=requests, tokens=tokens)
        key = self._keys.get(name)
        if key is None:
            return None
        key.concurrent += requests
        self._spend(name, key, requests, tokens, now_s)
        return Charge(name, requests, tokens, now_s)

    def settle(self, charge: Charge, used_tokens: int, now_s: float) -> None:
        """The request has ended: return what it did not use."""
        key = self._keys.get(charge.key)
        if key is None:
            return
        # A key that was removed and added again in between does not know the request.
        key.concurrent = max(0, key.concurrent - charge.requests)
        key.duration_s += DURATION_WEIGHT * (now_s - charge.at_s - key.duration_s)
        self._spend(charge.key, key, 0, used_tokens - charge.tokens, now_s)

    def status(self, name: str, now_s: float) -> tuple[LimitStatus | None, LimitStatus | None]:
        """The key's requests and tokens; None where they are not limited."""
        key = self._keys.get(name)
        if key is None:
            return None, None
        return (
            key.requests.status(now_s) if key.requests is not None else None,
            key.tokens.status(now_s) if key.tokens is not None else None,
        )

    def open_tokens(self, name: str, now_s: float, *, prompt_tokens: int, outputs: int, least: int) -> int | None:
        """The longest length for each of so many outputs whose callers left it open: what the key has now, and at
        least ``least`` if it can ever have that. None means unlimited."""
        key = self._keys.get(name)
        if key is None or key.tokens is None:
            return None
        now, ever = (int(amount - prompt_tokens) // outputs for amount in (key.tokens.left(now_s), key.tokens.capacity))
        return max(1, min(ever, max(now, least)))

    def open_requests(self, name: str) -> int:
        """Requests of a limited key that this gateway has open."""
        key = self._keys.get(name)
        return key.concurrent if key is not None else 0

    def usage(self, now_s: float) -> list[KeyUsage]:
        """What to report to the other gateways: keys in use, and those whose usage has just changed."""
        rows = []
        for name in list(self._told):
            key = self._keys[name]
            if not key.concurrent and key.told_until_s < now_s:
                del self._told[name]
                continue
            rows.append(
                KeyUsage(
                    name=name,
                    requests_total=key.requests_total,
                    tokens_total=key.tokens_total,
                    open_requests=key.concurrent,
                    requests_left=key.requests.left(now_s) if key.requests is not None else None,
                    tokens_left=key.tokens.left(now_s) if key.tokens is not None else None,
                )
            )
        return rows

    def take(self, report: KeyUsageReport, now_s: float) -> None:
        """What another gateway has used; one's own report is ignored."""
        if report.gateway_id == self._gateway_id:
            return
        other = self._others.get(report.gateway_id)
        if other is None or other.incarnation != report.incarnation:
            self._forget_silent(now_s)
            other = self._others[report.gateway_id] = _Gateway(report.incarnation, now_s)
        other.heard_s = now_s
        for row in report.keys:
            key = self._keys.get(row.name)
            if key is None:
                continue
            key.elsewhere[report.gateway_id] = (now_s, max(0, row.open_requests))
            before = other.rows.get(row.name)
            other.rows[row.name] = row
            for bucket, spent, left in (
                (key.requests, row.requests_total - (before.requests_total if before else 0), row.requests_left),
                (key.tokens, row.tokens_total - (before.tokens_total if before else 0), row.tokens_left),
            ):
                if bucket is None:
                    continue
                if before is not None:
                    bucket.spend(spent, now_s)
                elif left is not None:
                    bucket.level = min(bucket.left(now_s), left)

    def _spend(self, name: str, key: _Key, requests: int, tokens: int, now_s: float) -> None:
        key.requests_total += requests
        key.tokens_total += tokens
        if key.requests is not None:
            key.requests.spend(requests, now_s)
        if key.tokens is not None:
            key.tokens.spend(tokens, now_s)
        key.told_until_s = now_s + REPEAT_S
        self._told[name] = None

    def _forget_silent(self, now_s: float) -> None:
        self._others = {name: other for name, other in self._others.items() if now_s - other.heard_s <= FORGET_S}
        if len(self._others) >= MAX_GATEWAYS:
            del self._others[min(self._others, key=lambda name: self._others[name].heard_s)]


def pages(rows: list[KeyUsage], size: int) -> Iterable[tuple[KeyUsage, ...]]:
    """Rows in messages of a bounded size."""
    for start in range(0, len(rows), size):
        yield tuple(rows[start : start + size])


def _bucket(old: Bucket | None, capacity: int | None, now_s: float) -> Bucket | None:
    if capacity is None:
        return None
    if old is None:
        return Bucket(capacity, now_s)
    old.resize(capacity, now_s)
    return old


def _exceeded(name: str, what: str, limit: str, wait_s: float) -> RateLimitExceeded:
    error = RateLimitExceeded(
        f"key {name!r} has reached its limit of {limit}; try again in {wait_s:.1f} s", retry_after_s=wait_s
    )
    error.limit = what
    return error
