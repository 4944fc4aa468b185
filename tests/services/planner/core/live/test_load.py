"""From load reports to how long each queue takes."""

from __future__ import annotations

import msgspec
import pytest

from services.planner.core.live.load import ASSUMED_TOKENS_PER_S, REPORT_TTL_S, LoadView
from services.planner.core.live.pairs import SourceCandidate
from shared.messages.codec import decode, encode
from shared.messages.common import MAX_COUNT
from shared.messages.destinations import Destination, Destinations
from shared.messages.load import LoadReport, ModelQueue, QueueReport
from tests.processes import INCARNATION
from tests.records import profile


def load(instance_id: str = "i0", **changes: object) -> LoadReport:
    report = LoadReport(
        worker_id=f"w-{instance_id}",
        incarnation=INCARNATION,
        instance_id=instance_id,
        model="m",
        state="serving",
        role="colocated",
        queued_requests=0,
        queued_tokens=0,
        running_requests=0,
        running_tokens=0,
        prefill_tokens_total=0,
        decode_tokens_total=0,
        busy_s_total=0.0,
        kv_blocks_total=10,
        kv_blocks_used=0,
        kv_block_tokens=16,
    )
    return msgspec.structs.replace(report, **changes)


def queue(
    gateway_id: str = "g0", *, model: str = "m", requests: int = 0, tokens: int = 0, **totals: int
) -> QueueReport:
    held = ModelQueue(
        model=model,
        queued_requests=requests,
        queued_tokens=tokens,
        arrived_requests_total=totals.get("arrived", 0),
        arrived_prompt_tokens_total=totals.get("arrived_tokens", 0),
        inflight_requests=0,
    )
    return QueueReport(gateway_id=gateway_id, models=(held,))


def candidates(
    book: LoadView, *instance_ids: str, now_s: float = 0.0, slo_ttft_s: float = 1.0
) -> list[SourceCandidate]:
    return list(book.candidates("m", instance_ids, slo_ttft_s=slo_ttft_s, now_s=now_s))


# --- speed -----------------------------------------------------------------------------------------


def test_speed_is_assumed_until_an_instance_reports_it() -> None:
    assert LoadView().tokens_per_s("m", "i0") == ASSUMED_TOKENS_PER_S
    book = LoadView(assumed_tokens_per_s=50.0)
    book.on_load(load(queued_tokens=9, prefill_tokens_total=400, busy_s_total=0.1), 0.0)
    assert book.tokens_per_s("m", "i0") == 50.0, "one that has measured nothing"


def test_speed_is_the_instances_own() -> None:
    book = LoadView()
    book.on_load(load("i0", prefill_tokens_per_s=4000.0), 0.0)
    book.on_load(load("i1", prefill_tokens_per_s=1000.0), 0.0)
    assert book.tokens_per_s("m", "i0") == 4000.0
    assert book.tokens_per_s("m", "i1") == 1000.0
    book.on_load(load("i0", prefill_tokens_per_s=3000.0), 0.1)
    assert book.tokens_per_s("m", "i0") == 3000.0


def test_an_instance_that_measured_nothing_is_as_fast_as_the_models_others() -> None:
    book = LoadView()
    book.on_load(load("i0", prefill_tokens_per_s=4000.0), 0.0)
    book.on_load(load("i1"), 0.0)
    assert book.tokens_per_s("m", "i1") == book.tokens_per_s("m", "unheard") == 4000.0
    assert book.tokens_per_s("other", "i1") == ASSUMED_TOKENS_PER_S


@pytest.mark.parametrize("speed", [float("nan"), float("inf"), -1.0])
def test_a_speed_that_is_none_is_not_taken(speed: float) -> None:
    book = LoadView()
    book.on_load(load("i0", prefill_tokens_per_s=speed), 0.0)
    assert book.tokens_per_s("m", "i0") == ASSUMED_TOKENS_PER_S


def test_a_models_speed_outlives_its_instances() -> None:
    book = LoadView()
    book.on_load(load("i0", prefill_tokens_per_s=4000.0), 0.0)
    book.forget(REPORT_TTL_S + 1)
    assert book.tokens_per_s("m", "i0") == 4000.0


# --- queue and slack -------------------------------------------------------------------------------


def test_the_queue_is_its_own_and_an_even_share_of_the_gateways() -> None:
    book = LoadView(assumed_tokens_per_s=1000.0)
    book.on_load(load("i0", queued_tokens=500), 0.0)
    book.on_load(load("i1", queued_tokens=100), 0.0)
    book.on_queue(queue("g0", requests=1, tokens=300), 0.0)
    book.on_queue(queue("g1", requests=1, tokens=100), 0.0)
    book.on_queue(queue("g2", model="other", requests=9, tokens=9000), 0.0)
    assert [(o.instance_id, o.queue_s) for o in candidates(book, "i1", "i0")] == [("i0", 0.7), ("i1", 0.3)]


def test_the_slack_is_what_the_earliest_has_left_after_its_own_prefill() -> None:
    book = LoadView(assumed_tokens_per_s=1000.0)
    book.on_load(load(queued_requests=2, queued_tokens=800, oldest_queued_s=0.25), 0.0)
    (one,) = candidates(book, "i0", slo_ttft_s=2.0)
    assert one.slack_s == pytest.approx(2.0 - 0.25 - 0.4)


def test_the_mean_prompt_is_of_what_waits_at_gateways_else_of_what_arrived_there() -> None:
    book = LoadView(assumed_tokens_per_s=1000.0)
    book.on_load(load(queued_requests=1, queued_tokens=900), 0.0)
    book.on_queue(queue(arrived=10, arrived_tokens=1000), 0.0)
    assert candidates(book, "i0")[0].slack_s == pytest.approx(0.9)
    book.on_queue(queue(requests=2, tokens=400, arrived=12, arrived_tokens=1400), 0.0)
    assert candidates(book, "i0")[0].slack_s == pytest.approx(0.8)


def test_nothing_known_is_no_queue_and_all_the_slack() -> None:
    assert candidates(LoadView(), "i0", slo_ttft_s=1.5) == [SourceCandidate("i0", 0.0, 1.5)]
    assert candidates(LoadView()) == []


def test_an_instance_that_reports_nothing_has_its_share_of_the_gateways() -> None:
    book = LoadView(assumed_tokens_per_s=1000.0)
    book.on_load(load("i0", queued_tokens=500), 0.0)
    book.on_queue(queue(requests=1, tokens=400), 0.0)
    assert [o.queue_s for o in candidates(book, "i0", "i1")] == [0.7, 0.2]


def test_members_of_pairs_are_marked() -> None:
    found = LoadView().candidates("m", ("i0", "i1"), slo_ttft_s=1.0, now_s=0.0, in_pairs={"i1"})
    assert [(o.instance_id, o.live) for o in found] == [("i0", False), ("i1", True)]


def test_only_the_latest_report_counts() -> None:
    book = LoadView(assumed_tokens_per_s=1000.0)
    for tokens in (900, 100):
        book.on_load(load(queued_tokens=tokens), 0.0)
        book.on_queue(queue(requests=1, tokens=tokens), 0.0)
    assert candidates(book, "i0")[0].queue_s == pytest.approx(0.2)


def test_the_silent_are_forgotten() -> None:
    book = LoadView(assumed_tokens_per_s=1000.0)
    book.on_load(load(queued_tokens=500), 0.0)
    book.on_queue(queue(requests=1, tokens=500), 0.0)
    assert candidates(book, "i0", now_s=REPORT_TTL_S)[0].queue_s == pytest.approx(1.0)
    assert candidates(book, "i0", now_s=REPORT_TTL_S + 0.01)[0].queue_s == 0.0


def test_an_instance_that_was_profiled_is_as_fast_as_that_says_at_the_length_of_what_waits() -> None:
    book = LoadView()
    book.on_load(load("i0", queued_tokens=1000, queued_requests=10, prefill_tokens_per_s=7.0), 0.0)
    book.on_load(load("i1", queued_tokens=1000, queued_requests=10, prefill_tokens_per_s=50.0), 0.0)
    of = {"i0": profile()}
    short = book.candidates("m", ("i0", "i1"), slo_ttft_s=5.0, now_s=0.0, profiles=of)
    # 1000 tokens per second at 100 tokens, and no word of the other one.
    assert [(one.queue_s, one.slack_s) for one in short] == [
        pytest.approx((1.0, 4.9)),
        pytest.approx((20.0, 3.0)),
    ]
    book.on_load(load("i0", queued_tokens=2000, queued_requests=1), 0.0)
    book.on_load(load("i1"), 0.0)
    (long, _) = book.candidates("m", ("i0", "i1"), slo_ttft_s=5.0, now_s=0.0, profiles=of)
    assert long.queue_s == pytest.approx(4.0)  # 500 per second at 1000 tokens or more


def test_what_is_too_old_does_not_count_and_to_ask_about_one_model_goes_through_no_other() -> None:
    book = LoadView(assumed_tokens_per_s=1000.0)
    book.on_load(load("i0", queued_tokens=400), 0.0)
    book.on_load(load("i1", running_requests=1), 0.0)
    book.on_queue(queue(requests=1, tokens=600), 0.0)
    (found,) = candidates(book, "i0")
    assert found.queue_s == 1.0
    (late,) = candidates(book, "i0", now_s=REPORT_TTL_S + 1)
    assert late.queue_s == 0.0
    assert book.is_at_work("i1"), "a round asks for each of its loads; what is old is forgotten elsewhere, once"


def test_kv_that_cannot_be_is_a_number_that_can_be_sent() -> None:
    view = LoadView()
    view.on_load(load(kv_blocks_total=MAX_COUNT, kv_block_tokens=MAX_COUNT), 0.0)
    view.on_load(load("i1", kv_blocks_total=1, kv_blocks_used=MAX_COUNT, kv_block_tokens=MAX_COUNT), 0.0)
    for tokens in (view.free_kv_tokens("i0"), view.used_kv_tokens("i1")):
        named = Destination(worker_id="w", incarnation=INCARNATION, instance_id="i", kv_tokens=tokens)
        message = Destinations(destinations=(named,), send_back="none")
        assert decode(encode(message), Destinations) == message
    assert view.free_kv_tokens("i1") == 0


def test_how_long_a_waiting_request_has_lacked_kv_is_known_as_long_as_it_does() -> None:
    view = LoadView()
    for at_s, head_blocks in ((10.0, 5), (10.4, 7), (10.8, 7)):
        view.on_load(load(head_blocks=head_blocks), at_s)
        view.on_load(load("i1"), at_s)
    assert view.lacking(11.0) == {"i0": pytest.approx(1.0)}
    view.on_load(load(), 11.0)
    assert view.lacking(11.0) == {}
    view.on_load(load(head_blocks=5), 11.2)
    assert view.lacking(11.5) == {"i0": pytest.approx(0.3)}
    assert view.lacking(20.0) == {}, "it is silent"


def test_who_waits_for_kv_is_known() -> None:
    book = LoadView()
    book.on_load(load("i0", queued_tokens=100, head_blocks=3), 0.0)
    book.on_load(load("i1", queued_tokens=100), 0.0)
    assert [one.lacks_kv for one in candidates(book, "i0", "i1", "i2")] == [True, False, False]
