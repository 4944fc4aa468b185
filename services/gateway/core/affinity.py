"""Which prompts belong together, so that they meet the KV of those before them.

Rules
- Prompts belong together that have the first step of tokens in common (``shared.prefixes``), within their scope: the
  turns of a conversation begin alike, and so do questions about a document.
- What so many prompts begin with that it is more work than one instance's share is told further apart, by one step
  behind it: conversations behind a system prompt that all share spread over all instances, each of which will have
  that prompt's KV. Instances say where their prompts part, so that all gateways know the same. What takes little of an
  instance's time is left together, whatever its share is: an idle cluster has no need to compute it everywhere.
- A prompt that ends where it would be told apart belongs with none; nor does one that is shorter than a step.
- A caller's ``prompt_cache_key`` is part of what belongs together, of short prompts, too.

The cost of a prompt grows with what it shares with many, at most ``MAX_STEPS`` steps, and with nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice

from services.gateway.core.stream import StreamState
from shared.messages.load import LoadReport
from shared.prefixes import prefix_root, prefix_steps

COOL_SHARE = 0.5
"""A beginning is told further apart until it is less than this part of one instance's share."""
LEAST_BUSY = 0.25
"""Of an instance's time, that a beginning takes in all."""
MAX_HOMES = 65_536
"""Beginnings of which a gateway knows where the last prompt went, of all models together."""

Place = tuple[bytes, bytes, int]
"""Of a beginning: its name, that of its first step, and how many steps it has. As each instance says them: what one
says wrongly is another one."""


@dataclass(slots=True)
class _Said:
    """By one instance."""

    tokens: int
    places: dict[Place, int]
    at_s: float
    busy_s_total: float
    busy: float
    """The share of its time since it spoke before that."""


@dataclass(slots=True)
class _Known:
    """Of one beginning, by all instances."""

    tokens: int = 0
    num_said: int = 0
    hot: bool = False


class Homes:
    """Where the last prompt of each beginning went: as many as are bounded, those that were asked for last."""

    def __init__(self) -> None:
        self._instances: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._instances)

    def of(self, beginning: int) -> str:
        """Empty: nothing is known of it."""
        return self._instances.get(beginning, "")

    def went(self, beginning: int, instance_id: str) -> None:
        """Its last prompt went there."""
        self._instances.pop(beginning, None)
        self._instances[beginning] = instance_id
        if len(self._instances) > MAX_HOMES:
            del self._instances[next(iter(self._instances))]


@dataclass(slots=True)
class SharedBeginnings:
    """What the prompts of one model begin with."""

    _said: dict[str, _Said] = field(default_factory=dict)
    """By instance."""
    _tokens: int = 0
    _busy: float = 0.0
    """Instances, as if some were busy all the time and the others never."""
    _known: dict[Place, _Known] = field(default_factory=dict)
    _hot: dict[bytes, set[tuple[bytes, int]]] = field(default_factory=dict)
    """By the first step: the hot ones' names and how many steps each is."""

    def reported(self, report: LoadReport, num_instances: int, now_s: float) -> None:
        """Take what an instance says, of so many."""
        if not report.counted_tokens:
            return
        before = self._said.get(report.instance_id)
        since_s = now_s - before.at_s if before is not None else 0.0
        busy_s = report.busy_s_total - before.busy_s_total if before is not None else 0.0
        busy = min(1.0, max(0.0, busy_s / since_s)) if since_s > 0 else 0.0
        places = {(prefix.name, prefix.first, prefix.steps): prefix.tokens for prefix in report.hot_prefixes}
        said = _Said(report.counted_tokens, places, now_s, report.busy_s_total, busy)
        self._tokens += said.tokens
        self._busy += said.busy
        for place, tokens in places.items():
            known = self._known.setdefault(place, _Known())
            known.tokens += tokens
            known.num_said += 1
        if before is not None:
            self._withdraw(before)
        self._said[report.instance_id] = said
        for place in (*places, *(before.places if before is not None else ())):
            if place in self._known:
                self._judge(place, num_instances)

    def keep(self, instance_ids: Container[str]) -> None:
        """Forget what others said."""
        for instance_id in [name for name in self._said if name not in instance_ids]:
            self._withdraw(self._said.pop(instance_id))

    def beginning_of(self, stream: StreamState, secret: bytes) -> int | None:
        """A number that a prompt has in common with those that it belongs with; None: there are none."""
        if not stream.cache_scope:
            return None
        root = prefix_root(stream.model_hash, stream.cache_scope)
        steps = prefix_steps(root, stream.prompt_token_ids)
        name = next(steps, b"")
        if name in self._hot:
            hot = self._hot[name]
            name = _behind(hot, [name, *islice(steps, max(num_steps for _, num_steps in hot))])
        if not name and not stream.prompt_cache_key:
            return None
        about = hashlib.blake2b(name or root, digest_size=8, key=secret)
        about.update(stream.prompt_cache_key.encode(errors="surrogatepass"))
        return int.from_bytes(about.digest())

    def _withdraw(self, said: _Said) -> None:
        self._tokens -= said.tokens
        self._busy -= said.busy
        for place, tokens in said.places.items():
            known = self._known[place]
            known.tokens -= tokens
            known.num_said -= 1
            if not known.num_said:
                self._cool(place)
                del self._known[place]

    def _judge(self, place: Place, num_instances: int) -> None:
        known = self._known[place]
        share = known.tokens / self._tokens
        if share * num_instances > 1.0 and share * self._busy > LEAST_BUSY:
            name, first, steps = place
            known.hot = True
            self._hot.setdefault(first, set()).add((name, steps))
        elif share * num_instances < COOL_SHARE or share * self._busy < COOL_SHARE * LEAST_BUSY:
            self._cool(place)

    def _cool(self, place: Place) -> None:
        known, (name, first, steps) = self._known[place], place
        if known.hot:
            known.hot = False
            self._hot[first].remove((name, steps))
            if not self._hot[first]:
                del self._hot[first]


def _behind(hot: AbstractSet[tuple[bytes, int]], names: Sequence[bytes]) -> bytes:
    """The first of a prompt's names that is behind all that is hot; empty: it does not go on behind that."""
    deepest = max((steps for name, steps in hot if names[steps - 1 : steps] == [name]), default=0)
    return names[deepest] if deepest < len(names) else b""
