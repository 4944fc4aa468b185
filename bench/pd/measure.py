"""The steady part: one stack in a lab, first with colocated instances, then with the same workers in two roles."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.lab.checkpoint import make_checkpoint
from bench.lab.errors import LabFailed
from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from bench.openai_events import CompletionRequest
from bench.pd.result import Alone, Disaggregated, Loaded, Mutation, Result
from bench.pd.workload import KV_SHARE, TOKEN_IDS, Arrival, Model, Setting, link_gbps, make_arrivals
from bench.replay.plan import prompt_of
from bench.stream_client import Endpoint, StreamClient
from bench.streamed import Streamed, ask
from shared.checkpoint import inspect_checkpoint
from shared.messages.admin import SetModelBody, Status

Say = Callable[[str], None]
PATIENCE_S = 60.0
CHANGED_S = 60.0
POLL_S = 0.02
ALONE = 5
"""Lone prompts, after one that is not counted."""
ALONE_OUTPUT = 8
GOODPUT_SHARE = 0.957
"""Of a link's rate that plain TCP gets: what the rate is chosen by. What it gets is measured."""
START = Rate(2_000_000_000)
KV_MIB = 256


def worker_env(model: Model, kv_mib: int = KV_MIB) -> dict[str, str]:
    """The mock as the model says, and memory for KV."""
    return {
        "BLITZ_MOCK_LAYER_BASE_MS": f"{model.layer_base_ms:g}",
        "BLITZ_MOCK_LAYER_PER_TOKEN_US": f"{model.layer_per_token_us:g}",
        "BLITZ_WORKER_KV_MIB": str(kv_mib),
    }


async def measure(setting: Setting, model: Model, shares: Sequence[float], *, say: Say) -> Result:
    """``shares``: what KV takes of the time of prefill, the named case first. Raises ``LabUnavailable``, ``LabFailed``,
    ``StackError``, ``BlitzError``; everything made is taken away again."""
    with Network(setting.workers, START) as network, tempfile.TemporaryDirectory(prefix="blitzscale-pd-") as folder:
        path = await asyncio.to_thread(make_checkpoint, Path(folder) / "models", model.mib)
        weights_bytes = inspect_checkpoint(path, with_hash=False).layout.num_bytes
        async with LabStack(
            network,
            Path(folder) / "state",
            path,
            weights_bytes=weights_bytes,
            worker_env=worker_env(model),
            say=say,
        ) as stack:
            client = StreamClient(Endpoint.of(stack.url))
            try:
                return await stack.unless_given_up(_Bench(network, stack, client, setting, model, say).run(shares))
            finally:
                client.close()


class _Bench:
    def __init__(
        self, network: Network, stack: LabStack, client: StreamClient, setting: Setting, model: Model, say: Say
    ) -> None:
        self._network = network
        self._stack = stack
        self._client = client
        self._setting = setting
        self._model = model
        self._say = say

    async def run(self, shares: Sequence[float]) -> Result:
        workers, half = self._setting.workers, self._setting.workers // 2
        await self._become(SetModelBody(min_instances=workers, max_instances=workers), {"colocated": workers})
        alone = await self._alone()
        tokens_per_s = alone.num_tokens / alone.prefill_s
        self._say(f"prefill alone {alone.prefill_s:.3f} s ({tokens_per_s:.0f} tokens/s), step {alone.second_s:.4f} s")
        colocated = Loaded(await self._loaded())
        self._show("colocated", colocated)
        changes = SetModelBody(served_as="disaggregated", min_instances=half, max_instances=workers)
        since_s = time.time()
        await self._become(changes, {"prefill": half, "decode": half})
        mutations = await self._mutations(since_s)
        sweep = []
        for index, share in enumerate(shares or (KV_SHARE,)):
            gbps = await self._set_links(tokens_per_s, share)
            lone = await self._alone()
            kv_bytes = lone.num_tokens * self._model.kv_bytes_per_token
            loaded = Loaded(await self._loaded())
            point = Disaggregated(gbps, kv_bytes, lone, loaded)
            sweep.append(point)
            self._show(f"disaggregated, KV {point.kv_share():.2f} of prefill", loaded)
            hidden = point.hidden_share(alone)
            self._say(f"  second token {point.delay_s(alone) * 1000:.1f} ms later, {hidden:.2f} of the KV hidden")
            if index == 0 and point.alone.prefill_s > 1.5 * alone.prefill_s:
                raise LabFailed(f"a lone prompt took {point.alone.prefill_s:.2f} s, and {alone.prefill_s:.2f} s before")
        return Result(workers, alone, colocated, tuple(sweep), mutations)

    def _show(self, name: str, loaded: Loaded) -> None:
        d = loaded.document()
        self._say(
            f"{name}: {d['requests']} requests, {d['failed']} failed, TTFT {d['ttft_mean_s']}/{d['ttft_p99_s']} s, "
            f"TBT {d['tbt_mean_s']}/{d['tbt_p99_s']} s"
        )

    async def _become(self, changes: SetModelBody, roles: dict[str, int]) -> None:
        """Change the model's settings, and wait until these instances serve, and no others are there."""
        await self._stack.admin.set_model(self._stack.model, changes)
        deadline_s = time.monotonic() + CHANGED_S
        while True:
            status = await self._stack.admin.status()
            if _serving(status) == roles and len(status.instances) == sum(roles.values()):
                return
            if time.monotonic() > deadline_s:
                found = [(i.role, i.state) for i in status.instances]
                raise LabFailed(f"waited {CHANGED_S:.0f} s for {roles}: {found}; {status.unplanned}")
            await asyncio.sleep(POLL_S)

    async def _mutations(self, since_s: float) -> tuple[Mutation, ...]:
        found = []
        for record in await self._stack.admin.scale_records(limit=50):
            if record.direction == "mutate" and record.triggered_at_s >= since_s:
                planned_ms = record.trigger_to_plan_ms or 0.0
                found += [
                    Mutation(record.role, t.serving_ms - planned_ms) for t in record.targets if t.serving_ms is not None
                ]
        return tuple(found)

    async def _set_links(self, tokens_per_s: float, share: float) -> float:
        """Gigabits per second of plain TCP at the rate that the links have now."""
        gbps = link_gbps(self._model, tokens_per_s, share)
        rate = Rate(round(gbps / GOODPUT_SHARE * 1e9))
        for host in range(self._setting.workers):
            await asyncio.to_thread(self._network.set_rate, host, rate)
        num_bytes = self._setting.long_tokens * self._model.kv_bytes_per_token
        return (await asyncio.to_thread(self._network.goodput, num_bytes)).gbps

    async def _alone(self) -> Alone:
        answers = [await self._one_alone(number) for number in range(ALONE + 1)]
        return Alone(tuple(answers[1:]), self._setting.long_tokens)

    async def _one_alone(self, number: int) -> Streamed:
        prompt = prompt_of(self._setting.seed + 1, number, self._setting.long_tokens, token_ids=TOKEN_IDS)
        request = CompletionRequest.exactly(self._stack.model, prompt, ALONE_OUTPUT)
        answer = await ask(self._client, number, request, timeout_s=PATIENCE_S)
        if answer.error:
            raise LabFailed(f"a lone prompt failed: {answer.error}")
        return answer

    async def _loaded(self) -> tuple[Streamed, ...]:
        return await replay(self._client, self._stack.model, make_arrivals(self._setting))


async def replay(client: StreamClient, model: str, arrivals: Sequence[Arrival]) -> tuple[Streamed, ...]:
    """Every request at its time, whatever became of those before."""
    began_s = time.monotonic()

    async def one(arrival: Arrival) -> Streamed:
        await asyncio.sleep(max(0.0, began_s + arrival.at_s - time.monotonic()))
        request = CompletionRequest.exactly(model, arrival.prompt, arrival.output_tokens)
        return await ask(client, arrival.number, request, timeout_s=PATIENCE_S)

    return tuple(await asyncio.gather(*(one(arrival) for arrival in arrivals)))


def _serving(status: Status) -> dict[str, int]:
    return dict(Counter(i.role for i in status.instances if i.state == "serving"))
