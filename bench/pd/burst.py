"""A burst of long prompts with answers: both roles scale, with and without what brings decode instances sooner."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.lab.checkpoint import make_checkpoint
from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from bench.pd.measure import replay, worker_env
from bench.pd.result import Loaded
from bench.pd.workload import TOKEN_IDS, Arrival, Model
from bench.replay.plan import prompt_of
from bench.stream_client import Endpoint, StreamClient
from shared.checkpoint import inspect_checkpoint
from shared.messages.admin import SetModelBody

Say = Callable[[str], None]
LINKS = Rate(1_000_000_000)


@dataclass(frozen=True, slots=True)
class Variant:
    """What is on: decode is scaled with the rise of prefill, and by mutation."""

    name: str
    prescale: bool
    mutation: bool

    @property
    def service_env(self) -> dict[str, dict[str, str]]:
        return {
            "monitor": {"BLITZ_MONITOR_PRESCALE": str(int(self.prescale))},
            "planner": {"BLITZ_PLANNER_MUTATION": str(int(self.mutation))},
        }


VARIANTS = (
    Variant("prescale+mutation", prescale=True, mutation=True),
    Variant("prescale", prescale=True, mutation=False),
    Variant("mutation", prescale=False, mutation=True),
    Variant("neither", prescale=False, mutation=False),
)


@dataclass(frozen=True, slots=True)
class Burst:
    """A quiet beginning, then several times as much for a while."""

    workers: int = 6
    quiet_s: float = 4.0
    burst_s: float = 8.0
    quiet_per_s: float = 1.0
    burst_per_s: float = 6.0
    prompt_tokens: int = 800
    output_tokens: int = 200
    kv_mib: int = 96
    """Of each worker: the KV of a dozen requests. A prefill instance decodes what no decode instance has room for."""
    slo_ttft_s: float = 1.0
    slo_tbt_s: float = 0.032
    """A decode step of the mock takes 24 ms and 0.4 ms for each request: twenty at a time."""
    seed: int = 0

    def arrivals(self) -> tuple[Arrival, ...]:
        """In the order of time."""
        draw = random.Random(self.seed)
        found: list[Arrival] = []
        at_s = 0.0
        while at_s < self.quiet_s + self.burst_s:
            at_s += draw.expovariate(self.quiet_per_s if at_s < self.quiet_s else self.burst_per_s)
            number = len(found)
            length = round(self.prompt_tokens * draw.uniform(0.8, 1.2))
            prompt = prompt_of(self.seed, number, length, token_ids=TOKEN_IDS)
            found.append(Arrival(at_s, number, True, prompt, self.output_tokens))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class BurstResult:
    """Of one variant."""

    variant: Variant
    loaded: Loaded
    most: dict[str, int]
    """Instances that served at once, by role."""
    first_more_s: dict[str, float]
    """By role: seconds from the burst's begin to the first instance more that serves."""

    def document(self) -> dict[str, object]:
        """As JSON shows it."""
        return self.loaded.document() | {"most_instances": self.most, "first_more_s": self.first_more_s}


async def measure_burst(burst: Burst, model: Model, *, repetitions: int, say: Say) -> list[list[BurstResult]]:
    """Each variant, in turn; by repetition. Raises as ``measure``."""
    results: list[list[BurstResult]] = [[] for _ in range(repetitions)]
    with Network(burst.workers, LINKS) as network, tempfile.TemporaryDirectory(prefix="blitzscale-pd-") as folder:
        path = await asyncio.to_thread(make_checkpoint, Path(folder) / "models", model.mib)
        weights_bytes = inspect_checkpoint(path, with_hash=False).layout.num_bytes
        for repetition, found in enumerate(results):
            for variant in VARIANTS:
                async with LabStack(
                    network,
                    Path(folder) / f"{variant.name}-{repetition}",
                    path,
                    weights_bytes=weights_bytes,
                    worker_env=worker_env(model, burst.kv_mib),
                    service_env=variant.service_env,
                ) as stack:
                    result = await stack.unless_given_up(_run(stack, burst, variant))
                found.append(result)
                d = result.loaded.document()
                say(
                    f"{variant.name}: {d['failed']} of {d['requests']} failed, TTFT p99 {d['ttft_p99_s']} s, "
                    f"TBT p99 {d['tbt_p99_s']} s, most {result.most}, one more after {result.first_more_s} s"
                )
    return results


async def _run(stack: LabStack, burst: Burst, variant: Variant) -> BurstResult:
    changes = SetModelBody(
        served_as="disaggregated",
        min_instances=1,
        max_instances=burst.workers,
        slo_ttft_s=burst.slo_ttft_s,
        slo_tbt_s=burst.slo_tbt_s,
    )
    await stack.admin.set_model(stack.model, changes)
    watch = _Watch(stack)
    while {role: len(ids) for role, ids in (await watch.look()).items()} != {"prefill": 1, "decode": 1}:
        await asyncio.sleep(0.05)
    await stack.host_copies()
    client = StreamClient(Endpoint.of(stack.url))
    watching = asyncio.create_task(watch.run(burst.quiet_s))
    try:
        answers = await replay(client, stack.model, burst.arrivals())
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        client.close()
    return BurstResult(variant, Loaded(answers), watch.most, watch.first_more_s)


class _Watch:
    """Looks at which instances serve, by role."""

    def __init__(self, stack: LabStack) -> None:
        self._stack = stack
        self.most: dict[str, int] = {}
        self.first_more_s: dict[str, float] = {}

    async def look(self) -> dict[str, set[str]]:
        """Instance ids, by role."""
        found: dict[str, set[str]] = {}
        for instance in (await self._stack.admin.status()).instances:
            if instance.state == "serving":
                found.setdefault(instance.role, set()).add(instance.id)
        return found

    async def run(self, quiet_s: float) -> None:
        """From the first arrival on."""
        began_s = time.monotonic()
        while True:
            found = await self.look()
            for role, ids in found.items():
                self.most[role] = max(self.most.get(role, 0), len(ids))
                if len(ids) > 1 and role not in self.first_more_s:
                    self.first_more_s[role] = round(time.monotonic() - began_s - quiet_s, 3)
            await asyncio.sleep(0.05)
