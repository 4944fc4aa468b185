"""Pulls bring hidden states alone: KV follows apart, or is lost."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from services.worker.core.kv_admission import staging
from services.worker.core.live.machine import AnswerQuestion
from services.worker.device.completion import Completion
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.settings import MockTiming
from services.worker.engine.torch_engine import Activation, TorchEngine
from services.worker.live import kv_fetch
from services.worker.live.links import LinkToTarget
from services.worker.live.target import LiveTarget
from shared import subjects
from shared.errors import BadRequest, Conflict
from shared.messages.codec import Message
from shared.messages.common import Ack
from shared.messages.live import Dissolved, PlanSplit, Pulled, PullKv
from shared.transport.base import Buffer
from shared.transport.tags import Carries, tag_of
from tests.processes import process
from tests.services.cluster import Cluster
from tests.services.worker.late_workers import also_late
from tests.services.worker.live.burst import LAYER_S, NUM_TOKENS, PROMPTS, Burst, live_cluster
from tests.wait_until import WAIT_S, eventually

slow_cluster = functools.partial(live_cluster, mock=MockTiming(layer_per_token_s=0.012 / NUM_TOKENS))
RPC_S = 60.0


def carries(tag: int) -> int:
    """What a message is."""
    return tag // tag_of(0, 0, Carries.KV_TO_DECODE)


class Wire:
    """Loses a worker's KV to the other member while ``holds``."""

    def __init__(self) -> None:
        self.holds = True
        self.lost = 0
        self.sent = 0

    def tamper(self, buffer: Buffer, tag: int) -> tuple[Buffer, int]:
        if carries(tag) != Carries.PAIR_KV:
            return buffer, tag
        self.sent += 1
        if not self.holds:
            return buffer, tag
        self.lost += 1
        return buffer, tag ^ 1 << 60


async def _preemptions(burst: Burst) -> int:
    call = burst.source.serving.engine.call(lambda loop: loop.scheduler.load().preemptions_total)
    return await asyncio.wrap_future(call)


async def _split(cluster: Cluster, burst: Burst) -> int:
    """How many batches both members ran layers of."""
    (pair,) = (await cluster.record(burst.plan_id)).live
    assert pair.outcome == "dissolved", pair
    return sum(bool(b.target_layers and b.source_layers) for b in pair.batches)


@also_late("copies_last")
@pytest.mark.parametrize("piece_layers", [1, 2, 100])
@pytest.mark.parametrize("ahead", [1, 2])
async def test_kv_comes_in_pieces_a_window_ahead(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, piece_layers: int, ahead: int
) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst, wire = Burst(cluster), Wire()
        wire.holds = False
        await burst.start(until_split=True, delay_s=0.05)
        layer_bytes = NUM_TOKENS * burst.source.serving.engine.loop.engine.kv_bytes_per_token_layer
        monkeypatch.setattr(kv_fetch, "PIECE_BYTES", piece_layers * layer_bytes)
        monkeypatch.setattr(staging, "WINDOW_BYTES", ahead * piece_layers * layer_bytes)
        burst.target.transport.tamper = wire.tamper
        await burst.ends()
        assert await _split(cluster, burst) > 0
        assert wire.sent > 0
        assert await _preemptions(burst) == 0
        await burst.clean()


@also_late("drawn")
async def test_first_tokens_come_without_kv_and_what_is_lost_is_computed_again(redis_url: str) -> None:
    async with slow_cluster(redis_url, stall_s=4.0) as cluster:
        burst, wire = Burst(cluster), Wire()
        await burst.start(until_split=True, delay_s=0.05)
        burst.target.transport.tamper = wire.tamper
        source = await burst.live_source()
        await eventually(lambda: wire.lost)
        await eventually(lambda: source.record.first_cooperative_s is not None)
        wire.holds = False
        await burst.ends()
        assert await _split(cluster, burst) > 0
        assert await _preemptions(burst) > 0
        await burst.clean()


@also_late("copies_first")
async def test_the_target_is_killed_while_kv_is_on_its_way(redis_url: str) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst, wire = Burst(cluster), Wire()
        killed = list[bool]()
        await burst.start(until_split=lambda: killed, delay_s=0.2)
        burst.target.transport.tamper = wire.tamper
        source = await burst.live_source()
        await eventually(lambda: source.record.first_cooperative_s is not None)
        assert not source.machine.target_loaded
        await burst.target.kill()
        killed.append(True)
        await burst.ends()
        assert await _preemptions(burst) > 0
        await burst.clean()


async def test_cancelled_while_kv_is_on_its_way_a_request_leaves_nothing(redis_url: str) -> None:
    async with slow_cluster(redis_url, stall_s=4.0) as cluster:
        burst, wire = Burst(cluster), Wire()
        await burst.start(until_split=True, delay_s=0.05)
        burst.target.transport.tamper = wire.tamper
        await burst.live_source()
        await eventually(lambda: wire.lost)
        for request_id in burst.prompts:
            await cluster.gateway.cancel(burst.source.worker_id, request_id)
        wire.holds = False
        await cluster.record(burst.plan_id)
        await burst.clean()


async def _parted_with_begun_ones(burst: Burst, before: Callable[[], None] = lambda: None) -> list[str]:
    """Batches of which the target ran layers, and that it gives back as the pair dissolves; known once it does."""
    await burst.live_source()
    target = burst.live_target_of(burst.target)
    assert target is not None
    given: list[str] = []
    answer = target.carry_out[AnswerQuestion]

    def watched(action: AnswerQuestion) -> None:
        """The first word after the two have agreed: nothing is sent yet."""
        if isinstance(action.message, Dissolved) and not given:
            given.extend(g.batch_id for g in action.message.given if g.first_layer)
            before()
        answer(action)

    target.carry_out = {**target.carry_out, AnswerQuestion: watched}
    return given


async def test_what_is_given_at_the_end_comes_with_its_kv(redis_url: str) -> None:
    async with slow_cluster(redis_url, "best_effort") as cluster:
        burst, wire = Burst(cluster), Wire()
        wire.holds = False
        sent_before, is_watched = list[int](), list[bool]()
        await burst.start(until_split=lambda: is_watched and burst.is_split(), delay_s=0.02)
        given = await _parted_with_begun_ones(burst, lambda: sent_before.append(wire.sent))
        burst.target.transport.tamper = wire.tamper
        is_watched.append(True)
        await burst.ends()
        assert await _split(cluster, burst) > 0
        assert given
        assert wire.sent >= sent_before[0] + len(given)
        assert await _preemptions(burst) == 0
        await burst.clean()


async def test_what_cannot_be_handed_back_is_freed_at_the_target(redis_url: str) -> None:
    def broken(_: object) -> Completion[Buffer]:
        raise RuntimeError("the device is gone")

    async with slow_cluster(redis_url, "best_effort", stall_s=2.0) as cluster:
        burst = Burst(cluster)
        is_watched = list[bool]()
        await burst.start(until_split=lambda: is_watched, delay_s=0.02)
        given = await _parted_with_begun_ones(
            burst, lambda: setattr(burst.target.serving.engine.loop.engine, "hidden_states", broken)
        )
        is_watched.append(True)
        await burst.ends()
        assert given
        await burst.clean()


# --- claims without tags -------------------------------------------------------------------------


async def test_kv_that_there_are_no_tags_for_is_not_asked_for_and_computed_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Message] = []
    on_question = LiveTarget.on_question

    async def seen(target: LiveTarget, message: Any) -> Message:
        asked.append(message)
        return await on_question(target, message)

    monkeypatch.setattr(LiveTarget, "on_question", seen)
    monkeypatch.setattr(kv_fetch, "can_tag_kv", lambda *_: False)
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(until_split=True, delay_s=0.05)
        await burst.ends()
        assert await _split(cluster, burst) > 0
        assert await _preemptions(burst) > 0
        assert asked
        assert not any(isinstance(message, PullKv) for message in asked)
        await burst.clean()


# --- what the target answers ---------------------------------------------------------------------


async def test_kv_is_sent_once_and_only_of_what_the_source_has_pulled(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PullKv] = []
    ask = LiveTarget.on_question

    async def on_question(target: LiveTarget, message: Any) -> Message:
        if not isinstance(message, PullKv):
            return await ask(target, message)
        seen.append(message)
        for _ in range(2):
            await ask(target, message)  # its answer was lost
        with pytest.raises(BadRequest, match="that were run"):
            await ask(target, msgspec.structs.replace(message, last_layer=4))
        with pytest.raises(Conflict, match="not the source's to pull"):
            await ask(target, msgspec.structs.replace(message, batch_id="another"))
        return await ask(target, message)

    monkeypatch.setattr(LiveTarget, "on_question", on_question)
    async with slow_cluster(redis_url) as cluster:
        burst, wire = Burst(cluster), Wire()
        wire.holds = False
        await burst.start(until_split=True, delay_s=0.05)
        burst.target.transport.tamper = wire.tamper
        await burst.ends()
        assert wire.sent == len({(m.batch_id, m.first_layer) for m in seen}) > 0
        # What is settled is gone.
        subject = subjects.worker_live(process(burst.target.worker_id), "pull_kv")
        await burst.clean()
        with pytest.raises(Exception, match="pair"):
            await cluster.client.request(subject, seen[0], Ack, timeout_s=RPC_S)


# --- long prompts --------------------------------------------------------------------------------


@also_late("drawn")
@pytest.mark.parametrize("part_tokens", [7, 16])
async def test_long_prompts_are_split_between_the_members_as_well(redis_url: str, part_tokens: int) -> None:
    async with slow_cluster(redis_url, prefill_chunk_tokens=part_tokens) as cluster:
        burst = Burst(cluster)
        await burst.start(until_split=True, delay_s=0.05)
        await burst.ends()
        assert await _split(cluster, burst) > 0
        await burst.clean()


async def test_the_source_is_stopped_while_the_target_is_inside_a_long_layer(redis_url: str) -> None:
    async with slow_cluster(redis_url, prefill_chunk_tokens=16) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.06)
        await burst.live_source()
        target = burst.live_target_of(burst.target)
        assert target is not None
        await eventually(lambda: any(batch.in_layer for batch in target.machine.queue.batches()))
        stop = asyncio.create_task(burst.source.stop())
        await burst.ends()
        await stop
        await burst.clean()


MAX_CASES = 3
"""In which a batch is split between the two once, also on a busy machine."""


async def test_long_prompts_of_a_real_model_give_the_same_tokens_as_alone(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_part = TorchEngine.run_part
    bursts: list[Burst] = []

    def slowly(engine: TorchEngine, activation: Activation, layer: int, begin: int, end: int) -> Completion[None]:
        # However long a busy machine takes to form the pair: prompts still wait then.
        factor = 64 if bursts[-1].waits_for_pair() else 16
        time.sleep(factor * LAYER_S * (end - begin) / NUM_TOKENS)
        return run_part(engine, activation, layer, begin, end)

    monkeypatch.setattr(TorchEngine, "run_part", slowly)
    for _ in range(MAX_CASES):
        async with live_cluster(redis_url, engine="torch", kv_bytes=32 << 20, prefill_chunk_tokens=10) as cluster:
            burst, gateway = Burst(cluster), cluster.gateway
            bursts.append(burst)
            alone: dict[str, tuple[int, ...]] = {}

            async def ask_alone(burst: Burst = burst, alone: dict[str, tuple[int, ...]] = alone) -> None:
                gateway, worker = burst.cluster.gateway, burst.source
                for request_id, prompt in PROMPTS.items():
                    name = f"alone-{request_id}"
                    await gateway.submit(worker.worker_id, burst.source_instance_id, name, prompt=prompt, max_tokens=5)
                    await gateway.end_of(name)
                    alone[request_id] = gateway.tokens(name)

            await burst.start(until_split=True, delay_s=0.5, max_tokens=5, before=ask_alone)
            for request_id in PROMPTS:
                await gateway.end_of(request_id)
            assert {r: gateway.tokens(r) for r in PROMPTS} == alone
            num_split = await _split(cluster, burst)
            await burst.clean()
        if num_split:
            break
    assert num_split > 0


# --- the end of a pair ---------------------------------------------------------------------------


async def test_a_prompt_that_arrives_as_a_pair_dissolves_has_its_hidden_states_sent(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits until they are given up: that would take an hour here."""
    embed_tokens, ask, event_loop = MockEngine.embed_tokens, LinkToTarget.ask_pair, asyncio.get_running_loop()
    over, acknowledged, go_on = asyncio.Event(), asyncio.Event(), threading.Event()

    def slowly(engine: MockEngine, token_ids: Sequence[int]) -> Completion[Buffer]:
        event_loop.call_soon_threadsafe(acknowledged.set)
        assert go_on.wait(WAIT_S)
        return embed_tokens(engine, token_ids)

    async def held_up(link: LinkToTarget, *question: Any, **how: Any) -> Message:
        answer: Message = await ask(link, *question, **how)
        if isinstance(answer, Pulled) and answer.can_dissolve:
            over.set()
            await acknowledged.wait()
        return answer

    monkeypatch.setattr(MockEngine, "embed_tokens", slowly)
    monkeypatch.setattr(LinkToTarget, "ask_pair", held_up)
    async with slow_cluster(redis_url, stall_s=3600.0) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.02, prompts={})
        await eventually(over.is_set)
        source = burst.source.service.parts.pair_roles.source
        assert source is not None
        await burst.submit("late", PROMPTS["r0"])
        await eventually(lambda: source.machine.is_ending)
        go_on.set()
        await burst.ends()
        await burst.clean()


async def test_the_planner_is_told_what_pulls_took_so_far(redis_url: str) -> None:
    prompts = {r: prompt[: 30 + (7 * i) % 18] for i, (r, prompt) in enumerate(PROMPTS.items())}
    asked: list[PlanSplit] = []
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)

        async def before() -> None:
            await burst.submit("measured", PROMPTS["r0"])
            await cluster.gateway.end_of("measured")
            roles, request = burst.source.service.parts.pair_roles, burst.source.bus.request
            roles.pull_s = 0.0625

            async def watched(subject: str, message: Message, *args: object, **kwargs: object) -> object:
                if isinstance(message, PlanSplit):
                    asked.append(message)
                return await request(subject, message, *args, **kwargs)  # type: ignore[arg-type]

            burst.source.bus.request = watched  # type: ignore[method-assign,assignment]

        await burst.start(until_split=True, delay_s=0.05, prompts=prompts, before=before)
        await burst.ends()
        assert await _split(cluster, burst) > 0
        assert {split.pull_s for split in asked} == {0.0625}
        await eventually(lambda: burst.source.service.parts.pair_roles.source is None)
        assert 0 < burst.source.service.parts.pair_roles.pull_s != 0.0625
        await burst.clean()
