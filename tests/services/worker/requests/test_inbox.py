"""Requests in, tokens out, over the bus and a mock engine."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.worker import service
from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.sequence import ActiveSequence, sequence_of
from services.worker.requests import inbox
from services.worker.requests.inbox import Inbox
from shared import subjects
from shared.errors import BlitzError, Conflict, ContextLengthExceeded, NotFound, Overloaded, SentBack
from shared.messages.common import Ack
from shared.messages.generation import Cancel, Resend, SamplingParams, Submit
from tests.processes import process
from tests.services.fake_gateway import PROMPT, FakeGateway, expected_tokens
from tests.services.worker.lone_worker import LoneWorker, lone_worker
from tests.wait_until import WAIT_S, eventually

LEASE_S = 1.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner of a busy machine has time to answer."""
    monkeypatch.setattr(inbox, "OWNER_TIMEOUT_S", 60.0)


async def test_tokens_come_with_consecutive_offsets_and_one_end(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    for index in range(5):
        await alone.submit(instance_id, f"r{index}", max_tokens=10 + index)
    for index in range(5):
        assert (await alone.gateway.end_of(f"r{index}")).finish_reason == "length"
        assert alone.gateway.tokens(f"r{index}") == expected_tokens(10 + index)
    first = alone.gateway.parts["r0", 1][0]
    assert first.queued_s is not None
    assert first.queued_s >= 0
    assert {(b.worker_id, b.instance_id) for b in alone.gateway.batches} == {("w0", instance_id)}


async def test_a_steps_tokens_travel_in_one_message_per_gateway(alone: LoneWorker) -> None:
    other = FakeGateway(alone.broker, "gw2", model_hash=alone.model.model_hash)
    await other.start()
    instance_id = await alone.serve()
    await alone.pause()
    for gateway in (alone.gateway, other):
        for request_id in "ab":
            await gateway.submit("w0", instance_id, f"{gateway.gateway_id}-{request_id}", max_tokens=4)
    alone.resume()
    for gateway in (alone.gateway, other):
        for request_id in "ab":
            await gateway.end_of(f"{gateway.gateway_id}-{request_id}")
        assert [len(b.parts) for b in gateway.batches] == [2, 2, 2, 2]
        assert {request_id for request_id, _ in gateway.parts} == {f"{gateway.gateway_id}-{r}" for r in "ab"}


async def test_a_repeated_submit_changes_nothing(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.pause()
    for _ in range(3):
        await alone.submit(instance_id, "r")
    assert (await alone.stats()).load.queued_requests == 1
    alone.resume()
    await alone.gateway.end_of("r")
    await alone.submit(instance_id, "r")
    await alone.submit(instance_id, "next")
    await alone.gateway.end_of("next")
    assert alone.gateway.tokens("r") == expected_tokens(8)


async def test_a_newer_attempt_replaces_the_older_one_and_frees_its_place(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.pause()
    await alone.submit(instance_id, "r", attempt=1)
    await alone.submit(instance_id, "r", attempt=2)
    assert (await alone.stats()).load.queued_requests == 1, "nobody reads the older attempt"
    await alone.submit(instance_id, "r", attempt=1)  # delayed on its way
    alone.resume()
    await alone.gateway.end_of("r", attempt=2)
    assert alone.gateway.tokens("r", attempt=2) == expected_tokens(8)
    assert set(alone.gateway.parts) == {("r", 2)}


async def test_a_continuation_gives_the_tokens_of_an_undisturbed_run(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    whole = expected_tokens(20)
    await alone.submit(instance_id, "r", attempt=2, output=whole[:7], max_tokens=20)
    await alone.gateway.end_of("r", attempt=2)
    assert alone.gateway.tokens("r", attempt=2, start=7) == whole[7:]


async def test_a_continuation_that_has_everything_ends_at_once(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.submit(instance_id, "r", attempt=2, output=expected_tokens(8), max_tokens=8)
    end = await alone.gateway.end_of("r", attempt=2)
    assert (end.offset, end.token_ids, end.finish_reason) == (8, (), "length")


@pytest.mark.parametrize("offset", [0, 3, 8])
async def test_a_resend_gives_exactly_the_missing_tokens(alone: LoneWorker, offset: int) -> None:
    instance_id = await alone.serve()
    await alone.submit(instance_id, "r")
    await alone.gateway.end_of("r")
    alone.gateway.parts.clear()
    await alone.gateway.resend("w0", "r", offset=offset)
    end = await alone.gateway.end_of("r")
    assert (end.offset, end.token_ids, end.finish_reason) == (offset, expected_tokens(8)[offset:], "length")
    assert len(alone.gateway.parts["r", 1]) == 1


async def test_a_resend_in_the_middle_of_a_stream_leaves_no_gap(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.pause()
    await alone.submit(instance_id, "r", max_tokens=50)
    alone.broker.disconnect("gateway-gw-1")  # what is sent now is lost to it
    alone.resume()
    await eventually(lambda: alone.worker.serving.num_requests == 0)
    await alone.worker.service.parts.inbox.flushed()
    alone.broker.reconnect("gateway-gw-1")
    await alone.gateway.resend("w0", "r")
    await alone.gateway.end_of("r")
    assert alone.gateway.tokens("r") == expected_tokens(50)


async def test_a_prompts_log_probabilities_come_before_its_tokens_and_again_from_a_position(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.submit(instance_id, "r", max_tokens=4, prompt_logprobs=2)
    await alone.gateway.end_of("r")
    parts = alone.gateway.parts["r", 1]
    kinds = [part.prompt is not None for part in parts]
    assert kinds == sorted(kinds, reverse=True)
    said = [part.prompt for part in parts if part.prompt is not None]
    assert [one.start for one in said] == [1, *(one.end for one in said)][: len(said)]
    assert said[-1].end == len(PROMPT)
    before = len(parts)
    await alone.gateway.resend("w0", "r", offset=4, prompt_offset=2)
    await eventually(lambda: len(alone.gateway.parts["r", 1]) > before + 1)
    again = [part.prompt for part in alone.gateway.parts["r", 1][before:] if part.prompt is not None]
    assert again[-1].end == len(PROMPT)
    assert again[0].start <= 2


async def test_a_stream_nobody_knows_cannot_be_resent(alone: LoneWorker) -> None:
    with pytest.raises(NotFound):
        await alone.gateway.resend("w0", "r")
    instance_id = await alone.serve()
    await alone.submit(instance_id, "r")
    await alone.gateway.end_of("r")
    with pytest.raises(NotFound):
        await alone.gateway.resend("w0", "r", attempt=2)


async def test_an_acknowledged_end_is_forgotten(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    for request_id in ("r", "kept"):
        await alone.submit(instance_id, request_id)
        await alone.gateway.end_of(request_id)
    await alone.gateway.ack("w0", "r")
    with pytest.raises(NotFound):
        await alone.gateway.resend("w0", "r")
    await alone.gateway.resend("w0", "kept")


async def test_a_cancel_frees_the_kv_within_a_step_and_sends_no_more() -> None:
    async with lone_worker() as alone:
        instance_id = await alone.serve()
        await alone.pause("long")
        await alone.submit(instance_id, "long", max_tokens=900)
        await alone.gateway.tokens_arrived("long", 1)
        assert (await alone.stats()).load.kv_blocks_used > 0
        await alone.gateway.cancel("w0", "long")
        await eventually(lambda: alone.worker.serving.engine.stats().load.kv_blocks_used == 0)
        sent = alone.gateway.tokens("long")
        alone.resume()
        await alone.submit(instance_id, "next")
        await alone.gateway.end_of("next")
        assert alone.gateway.tokens("long") == sent
        assert len(sent) < 900


async def test_a_cancel_of_an_older_attempt_leaves_the_newer_one(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.pause()
    await alone.submit(instance_id, "r", attempt=2)
    await alone.gateway.cancel("w0", "r", attempt=1)
    alone.resume()
    await alone.gateway.end_of("r", attempt=2)


async def test_a_silent_gateways_requests_are_freed_after_its_lease(alone: LoneWorker) -> None:
    other = FakeGateway(alone.broker, "living", model_hash=alone.model.model_hash)
    await other.start()
    instance_id = await alone.serve()
    await alone.pause()
    await other.beat(60.0)
    await alone.submit(instance_id, "orphan")
    await other.submit("w0", instance_id, "cared-for")
    assert (await alone.stats()).load.queued_requests == 2
    await alone.gateway.beat(LEASE_S)
    await eventually(lambda: alone.worker.serving.num_requests == 1)
    alone.resume()
    await other.end_of("cared-for")
    with pytest.raises(NotFound):
        await alone.gateway.resend("w0", "orphan")


async def test_an_outage_of_our_own_bus_is_not_a_gateways_silence() -> None:
    async with lone_worker(report_interval_s=0.01) as alone:
        instance_id = await alone.serve()
        await alone.pause()
        await alone.submit(instance_id, "r")
        await alone.gateway.beat(LEASE_S)
        alone.broker.disconnect("w0")
        await asyncio.sleep(2 * LEASE_S)
        assert (await alone.stats()).load.queued_requests == 1
        alone.broker.reconnect("w0")
        # It is silent for longer than its lease, but we could not have heard it: not yet counted.
        serving_of(alone).expire()
        assert (await alone.stats()).load.queued_requests == 1
        await alone.gateway.beat(60.0)
        await asyncio.sleep(2 * LEASE_S)
        alone.resume()
        assert (await alone.gateway.end_of("r")).finish_reason == "length"


async def test_a_worker_that_stood_still_takes_no_gateway_for_dead(
    alone: LoneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "STOOD_STILL_S", 0.5)
    instance_id = await alone.serve()
    await alone.pause()
    await alone.submit(instance_id, "r")
    await alone.gateway.beat(LEASE_S)
    await asyncio.sleep(0)  # it is heard
    time.sleep(1.5 * LEASE_S)  # noqa: ASYNC251 - all of the process, as if it were stopped
    serving_of(alone).expire()
    await alone.gateway.beat(60.0)
    alone.resume()
    assert (await alone.gateway.end_of("r")).finish_reason == "length"


async def test_a_worker_that_seldom_looks_frees_a_silent_gateways_requests() -> None:
    async with lone_worker(report_interval_s=1.5 * inbox.STOOD_STILL_S) as alone:
        instance_id = await alone.serve()
        await alone.pause()
        await alone.submit(instance_id, "r")
        await alone.gateway.beat(LEASE_S)
        await eventually(lambda: alone.worker.serving.num_requests == 0)
        alone.resume()


async def test_a_request_that_may_not_wait_is_refused_while_all_seats_are_taken() -> None:
    async with lone_worker(max_running_requests=2) as alone:
        instance_id = await alone.serve()
        await alone.pause()
        for name in "ab":
            await alone.submit(instance_id, name, may_wait=False)
        with pytest.raises(Overloaded, match="all 2 slots of i1 are taken"):
            await alone.submit(instance_id, "c", may_wait=False)
        await alone.submit(instance_id, "a", may_wait=False)  # repeated: it is here
        await alone.submit(instance_id, "a", attempt=2, may_wait=False)  # in the seat of the one before
        await alone.submit(instance_id, "waits")
        assert (await alone.stats()).load.queued_requests == 3
        for name, attempt in (("a", 2), ("b", 1), ("waits", 1)):
            await alone.gateway.cancel("w0", name, attempt=attempt)
        await alone.submit(instance_id, "c", may_wait=False)
        alone.resume()
        assert (await alone.gateway.end_of("c")).finish_reason == "length"
        for name in "de":  # those that have ended are in nobody's way, read or not
            await alone.submit(instance_id, name, may_wait=False)
            await alone.gateway.end_of(name)


async def test_a_full_queue_refuses_and_forgets_what_it_refused() -> None:
    async with lone_worker(max_queued_requests=2) as alone:
        instance_id = await alone.serve()
        await alone.pause()
        for index in range(2):
            await alone.submit(instance_id, f"r{index}")
        with pytest.raises(Overloaded):
            await alone.submit(instance_id, "refused")
        with pytest.raises(NotFound):
            await alone.gateway.resend("w0", "refused")
        alone.resume()
        await alone.gateway.end_of("r1")
        await alone.submit(instance_id, "refused")
        await alone.gateway.end_of("refused")


async def test_a_prompt_beyond_the_context_is_refused(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    context_tokens = alone.worker.serving.info().context_tokens
    with pytest.raises(ContextLengthExceeded):
        await alone.submit(instance_id, "long", prompt=(65,) * context_tokens)
    with pytest.raises(ContextLengthExceeded):
        await alone.submit(instance_id, "empty", prompt=())
    await alone.submit(instance_id, "fits", prompt=(65,) * (context_tokens - 1), max_tokens=8)
    assert (await alone.gateway.end_of("fits")).finish_reason == "length"
    assert len(alone.gateway.tokens("fits")) == 1


async def test_another_instances_request_is_refused(alone: LoneWorker) -> None:
    with pytest.raises(Conflict):
        await alone.submit("i1", "spare")
    await alone.serve()
    with pytest.raises(Conflict):
        await alone.submit("older-instance", "r")
    assert alone.gateway.parts == {}


async def test_a_stopped_worker_finishes_what_runs_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FAREWELL_S", WAIT_S)
    async with lone_worker(drain_timeout_s=600.0) as alone:
        instance_id = await alone.serve()
        await alone.pause("r")
        await alone.submit(instance_id, "r", max_tokens=40)
        await alone.gateway.tokens_arrived("r", 1)
        stopping = asyncio.create_task(alone.worker.stop())
        await eventually(lambda: alone.pool.heartbeats[-1].state == "draining")
        with pytest.raises(SentBack):
            await alone.submit(instance_id, "late")
        assert not alone.pool.heartbeats[-1].leaving
        alone.resume()
        await stopping
        await alone.gateway.end_of("r")
        assert alone.gateway.tokens("r") == expected_tokens(40)
        assert alone.pool.heartbeats[-1].leaving


async def test_a_drain_that_takes_too_long_is_cut_short_and_gateways_hear_of_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "HAND_BACK_S", WAIT_S)
    monkeypatch.setattr(service, "FAREWELL_S", WAIT_S)
    async with lone_worker(drain_timeout_s=0.1) as alone:
        instance_id = await alone.serve()
        await alone.pause()
        await alone.submit(instance_id, "stuck")
        await alone.worker.stop()
        assert alone.pool.heartbeats[-1].leaving
        assert alone.gateway.tokens("stuck") == ()
        end = await alone.gateway.end_of("stuck")
        assert end.error is not None
        assert (end.error.code, end.error.message) == ("sent_back", "worker w0 leaves")


async def test_prompts_share_the_engine_without_disturbing_each_other(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    prompts = {f"r{i}": (*PROMPT, *range(65, 65 + 13 * i)) for i in range(8)}
    for request_id, prompt in prompts.items():
        await alone.submit(instance_id, request_id, prompt=prompt, max_tokens=30)
    for request_id, prompt in prompts.items():
        await alone.gateway.end_of(request_id)
        assert alone.gateway.tokens(request_id) == expected_tokens(30, prompt)


# --- live scaling: requests that are another worker's, were, or will be ---------------------------


class Owner:
    """Another worker, as far as a question about a request can tell."""

    def __init__(self, alone: LoneWorker, error: BlitzError | None = None) -> None:
        self._bus = alone.broker.bus("w9")
        self._error = error
        self.asked: list[Resend] = []
        self.cancelled: list[Cancel] = []

    async def start(self) -> Owner:
        await self._bus.respond(subjects.worker_resend(process("w9")), Resend, self._on_resend)
        await self._bus.subscribe(subjects.worker_cancel(process("w9")), Cancel, self.cancelled.append)
        return self

    async def _on_resend(self, request: Resend) -> Ack:
        self.asked.append(request)
        if self._error is not None:
            raise self._error
        return Ack()


class Partner:
    """A pair that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []

    def arrived(self) -> None:
        self.told.append(("arrived",))

    def cancel(self, request_id: str, attempt: int) -> None:
        self.told.append(("cancel", request_id, str(attempt)))

    def cancel_gateway(self, gone: Gone) -> None:
        self.told.append(("cancel_gateway", gone.gateway_id))


def serving_of(alone: LoneWorker) -> Inbox:
    return alone.worker.service.parts.inbox


def a_submit(request_id: str = "r", *, attempt: int = 1, output: tuple[int, ...] = ()) -> Submit:
    return Submit(
        request_id=request_id,
        attempt=attempt,
        gateway_id="gw",
        instance_id="i1",
        model="m",
        model_hash="h",
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=8, seed=1, temperature=0.0),
        output_token_ids=output,
        gateway_incarnation="1",
    )


def guest(submit: Submit) -> ActiveSequence:
    return sequence_of(submit, ())


async def give_away(alone: LoneWorker, *request_ids: str) -> list[ActiveSequence]:
    """Requests that wait here become w9's."""
    instance_id = await alone.serve()
    await alone.pause()
    for request_id in request_ids:
        await alone.submit(instance_id, request_id)

    engine = alone.worker.serving.engine
    lent = await asyncio.wrap_future(engine.call(lambda loop: loop.scheduler.lend()))
    serving_of(alone).moved(lent, process("w9"))
    await asyncio.wrap_future(engine.call(lambda loop: loop.scheduler.release_to_target(lent)))
    alone.resume()
    return lent


async def test_a_question_about_a_request_that_went_away_goes_to_its_owner(alone: LoneWorker) -> None:
    owner = await Owner(alone).start()
    await give_away(alone, "r")
    await alone.gateway.resend("w0", "r", offset=3)
    assert owner.asked == [Resend(request_id="r", attempt=1, offset=3)]
    assert alone.gateway.parts == {}, "nothing of it is streamed from here"
    with pytest.raises(NotFound):
        await alone.gateway.resend("w0", "r", attempt=2)
    assert len(owner.asked) == 1, "another attempt is not the owner's"


async def test_what_the_owner_says_reaches_the_gateway(alone: LoneWorker) -> None:
    await Owner(alone, NotFound("never heard of it")).start()
    await give_away(alone, "r")
    with pytest.raises(NotFound, match="never heard of it"):
        await alone.gateway.resend("w0", "r")


async def test_an_owner_that_is_gone_does_not_make_this_worker_look_dead(alone: LoneWorker) -> None:
    await give_away(alone, "r")
    with pytest.raises(NotFound, match="w9, which does not answer"):
        await alone.gateway.resend("w0", "r")


async def test_a_cancel_of_a_request_that_went_away_goes_to_its_owner(alone: LoneWorker) -> None:
    owner = await Owner(alone).start()
    await give_away(alone, "r", "other")
    await alone.gateway.cancel("w0", "r", attempt=2)  # not the one that went
    await alone.gateway.cancel("w0", "r")
    await eventually(lambda: owner.cancelled)
    assert owner.cancelled == [Cancel(request_id="r", attempt=1)]


async def test_what_ended_before_it_could_go_is_nobodys(alone: LoneWorker) -> None:
    owner = await Owner(alone).start()
    ended = guest(a_submit())
    ended.finished = True
    serving_of(alone).moved([ended], process("w9"))
    with pytest.raises(NotFound):
        await alone.gateway.resend("w0", "r")
    assert owner.asked == []


async def test_a_guests_tokens_are_streamed_once_it_is_announced(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    serving, engine = serving_of(alone), alone.worker.serving.engine
    submit = a_submit("r", output=expected_tokens(8)[:3])
    serving.host([submit])
    sequence = guest(submit)
    serving.announce([sequence])
    await alone.gateway.tokens_arrived("r", 0)
    await eventually(lambda: ("r", 1) in alone.gateway.parts)
    (first,) = alone.gateway.parts["r", 1]
    assert (first.offset, first.token_ids, first.finish_reason) == (3, (), None)
    batch = alone.gateway.batches[0]
    assert (batch.worker_id, batch.instance_id) == ("w0", instance_id)
    engine.submit(sequence)  # as if its prefix had been computed
    await alone.gateway.end_of("r")
    assert alone.gateway.tokens("r", start=3) == expected_tokens(8)[3:]
    alone.gateway.parts.clear()
    await alone.gateway.resend("w0", "r", offset=3)
    assert (await alone.gateway.end_of("r")).token_ids == expected_tokens(8)[3:]


async def test_a_guest_that_leaves_is_forgotten(alone: LoneWorker) -> None:
    submits = [a_submit("r"), a_submit("s")]
    serving_of(alone).host(submits)
    serving_of(alone).unhost([guest(submits[0])])
    with pytest.raises(NotFound):
        await alone.gateway.resend("w0", "r")
    await alone.gateway.resend("w0", "s")


async def test_a_newer_attempt_stays_when_the_guest_of_an_older_one_leaves(alone: LoneWorker) -> None:
    older, newer = a_submit("r", attempt=1), a_submit("r", attempt=2)
    for order in ([older, newer], [newer, older]):
        for submit in order:
            serving_of(alone).host([submit])
        serving_of(alone).unhost([guest(older)])
        await alone.gateway.resend("w0", "r", attempt=2)
        serving_of(alone).unhost([guest(newer)])


async def test_a_pair_is_told_of_arrivals_and_of_cancels(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    partner = Partner()
    serving_of(alone).cooperate(partner)
    await alone.pause()
    await alone.submit(instance_id, "r")
    await alone.submit(instance_id, "r")  # repeated
    with pytest.raises(ContextLengthExceeded):
        await alone.submit(instance_id, "refused", prompt=())
    await alone.gateway.cancel("w0", "r")
    await eventually(lambda: len(partner.told) == 2)
    assert partner.told == [("arrived",), ("cancel", "r", "1")]
    alone.resume()


async def test_a_pair_is_told_of_a_gateway_that_is_gone(alone: LoneWorker) -> None:
    partner = Partner()
    serving_of(alone).cooperate(partner)
    await alone.gateway.beat(LEASE_S)
    await eventually(lambda: partner.told == [("cancel_gateway", "gw")])


async def test_a_gateway_that_was_never_heard_is_not_gone_when_its_request_is_hosted(alone: LoneWorker) -> None:
    serving_of(alone).host([a_submit("r")])
    await asyncio.sleep(LEASE_S)
    await alone.gateway.resend("w0", "r")


async def test_a_pair_is_told_of_an_attempt_that_a_newer_one_replaces(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    partner = Partner()
    serving_of(alone).cooperate(partner)
    await alone.pause()
    await alone.submit(instance_id, "r", attempt=1)
    await alone.submit(instance_id, "r", attempt=2)
    alone.resume()
    assert ("cancel", "r", "1") in partner.told


async def test_a_submit_that_is_repeated_after_the_request_went_away_changes_nothing(alone: LoneWorker) -> None:
    owner = await Owner(alone).start()
    await give_away(alone, "r")
    await alone.pause()
    for _ in range(2):
        await alone.submit(alone.worker.serving.instance_id, "r")
    load = (await alone.stats()).load
    assert (load.queued_requests, load.running_requests) == (0, 0)
    await alone.gateway.resend("w0", "r")
    assert len(owner.asked) == 1, "it is still the owner's"
    await alone.submit(alone.worker.serving.instance_id, "r", attempt=2)
    assert (await alone.stats()).load.queued_requests == 1, "another attempt may come here"
    alone.resume()
    await alone.gateway.end_of("r", attempt=2)


async def test_a_guest_takes_the_place_of_earlier_attempts(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    serving, partner = serving_of(alone), Partner()
    serving.cooperate(partner)
    await alone.pause()
    await alone.submit(instance_id, "r", attempt=1)
    serving.supersede(a_submit("r", attempt=2), alone.worker.serving)
    assert (await alone.stats()).load.queued_requests == 0, "nobody reads the older attempt"
    assert partner.told == [("arrived",), ("cancel", "r", "1")]
    alone.resume()


async def test_a_guest_does_not_take_the_place_of_a_later_attempt_nor_of_its_own(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.pause()
    await alone.submit(instance_id, "r", attempt=2)
    with pytest.raises(Conflict, match="attempt 2 of request r is here already, 1 is over"):
        serving_of(alone).supersede(a_submit("r", attempt=1), alone.worker.serving)
    serving_of(alone).supersede(a_submit("r", attempt=2), alone.worker.serving)
    serving_of(alone).supersede(a_submit("unknown"), alone.worker.serving)
    assert (await alone.stats()).load.queued_requests == 1
    alone.resume()
    await alone.gateway.end_of("r", attempt=2)
