"""From load reports to how long each queue takes."""

from __future__ import annotations

import msgspec
import pytest

from services.planner.core.load_book import ASSUMED_TOKENS_PER_S, NEWEST_SHARE, REPORT_TTL_S, LoadBook
from services.planner.core.zigzag_pairs import Overloaded
from shared.messages.load import LoadReport, ModelQueue, QueueReport


def load(instance_id: str = "i0", **changes: object) -> LoadReport:
    report = LoadReport(
        worker_id=f"w-{instance_id}",
        instance_id=instance_id,
        model="m",
        state="serving",
        role="colocated",
        published_at_s=0.0,
        queued_requests=0,
        queued_tokens=0,
        running_requests=0,
        running_tokens=0,
        prefill_tokens_total=0,
        decode_tokens_total=0,
        busy_s_total=0.0,
        kv_blocks_total=10,
        kv_blocks_used=0,
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
    return QueueReport(gateway_id=gateway_id, published_at_s=0.0, models=(held,))


def overloaded(book: LoadBook, *instance_ids: str, now_s: float = 0.0, slo_ttft_s: float = 1.0) -> list[Overloaded]:
    return list(book.overloaded("m", instance_ids, slo_ttft_s=slo_ttft_s, now_s=now_s))


def measure(book: LoadBook, *steps: tuple[int, float], instance_id: str = "i0", queued_tokens: int = 1000) -> None:
    """Reports at (prefill tokens, busy seconds), 0.1 s apart."""
    for i, (tokens, busy_s) in enumerate(steps):
        report = load(instance_id, queued_tokens=queued_tokens, prefill_tokens_total=tokens, busy_s_total=busy_s)
        book.on_load(report, 0.1 * i)


# --- speed -----------------------------------------------------------------------------------------


def test_speed_is_assumed_until_it_was_measured() -> None:
    assert LoadBook().tokens_per_s("m", "i0") == ASSUMED_TOKENS_PER_S
    assert LoadBook(assumed_tokens_per_s=50.0).tokens_per_s("m") == 50.0


def test_speed_is_tokens_per_busy_second_while_prompts_wait() -> None:
    book = LoadBook()
    measure(book, (0, 0.0), (400, 0.1))
    assert book.tokens_per_s("m", "i0") == pytest.approx(4000.0)


def test_speed_is_smoothed() -> None:
    book = LoadBook()
    measure(book, (0, 0.0), (400, 0.1), (1400, 0.2))
    assert book.tokens_per_s("m", "i0") == pytest.approx((1 - NEWEST_SHARE) * 4000 + NEWEST_SHARE * 10_000)


def test_a_step_longer_than_the_reports_are_apart_counts_once() -> None:
    book = LoadBook()
    # Steps of 300 tokens and 0.3 s; tokens count at the beginning of a step, busy time at its end.
    measure(
        book,
        (300, 0.0),
        (300, 0.0),
        (600, 0.3),
        (600, 0.3),
        (600, 0.3),
        (900, 0.6),
        (900, 0.6),
        (900, 0.6),
        (1200, 0.9),
    )
    assert book.tokens_per_s("m", "i0") == pytest.approx(1000.0)


def test_an_instance_without_waiting_prompts_shows_no_speed() -> None:
    book = LoadBook()
    measure(book, (0, 0.0), (10, 0.1), (20, 0.2), queued_tokens=0)
    assert book.tokens_per_s("m", "i0") == ASSUMED_TOKENS_PER_S


def test_a_pause_between_two_reports_is_not_measured_over() -> None:
    book = LoadBook()
    measure(book, (0, 0.0), (400, 0.1))
    book.on_load(load(prefill_tokens_total=410, busy_s_total=5.0), 0.2)
    assert book.tokens_per_s("m", "i0") == pytest.approx(4000.0)
    book.on_load(load(queued_tokens=9, prefill_tokens_total=420, busy_s_total=6.0), 0.3)
    assert book.tokens_per_s("m", "i0") == pytest.approx(4000.0)
    book.on_load(load(queued_tokens=9, prefill_tokens_total=820, busy_s_total=6.1), 0.4)
    assert book.tokens_per_s("m", "i0") == pytest.approx(4000.0)


@pytest.mark.parametrize("state", ["live", "draining", "loading"])
def test_only_serving_instances_are_measured(state: str) -> None:
    book = LoadBook()
    for tokens in (0, 400):
        book.on_load(load(state=state, queued_tokens=9, prefill_tokens_total=tokens, busy_s_total=tokens / 4000), 0.0)
    assert book.tokens_per_s("m", "i0") == ASSUMED_TOKENS_PER_S


def test_steps_that_decode_only_say_nothing_about_prefill() -> None:
    book = LoadBook()
    measure(book, (0, 0.0), (400, 0.1), (400, 0.2), (400, 0.3))
    assert book.tokens_per_s("m", "i0") == pytest.approx(4000.0)


def test_counters_that_fall_are_not_measured() -> None:
    book = LoadBook()
    measure(book, (5000, 9.0), (400, 9.1))
    measure(book, (0, 9.2), (400, 0.1))
    assert book.tokens_per_s("m", "i0") == ASSUMED_TOKENS_PER_S


def test_an_instance_that_was_not_measured_is_as_fast_as_the_models_others() -> None:
    book = LoadBook()
    measure(book, (0, 0.0), (400, 0.1))
    assert book.tokens_per_s("m", "i1") == pytest.approx(4000.0)
    assert book.tokens_per_s("other", "i1") == ASSUMED_TOKENS_PER_S
    measure(book, (0, 0.0), (100, 0.1), instance_id="i1")
    assert book.tokens_per_s("m", "i1") == pytest.approx(1000.0)
    assert book.tokens_per_s("m", "i0") == pytest.approx(4000.0)


# --- queue and slack -------------------------------------------------------------------------------


def test_the_queue_is_its_own_and_an_even_share_of_the_gateways() -> None:
    book = LoadBook(assumed_tokens_per_s=1000.0)
    book.on_load(load("i0", queued_tokens=500), 0.0)
    book.on_load(load("i1", queued_tokens=100), 0.0)
    book.on_queue(queue("g0", requests=1, tokens=300), 0.0)
    book.on_queue(queue("g1", requests=1, tokens=100), 0.0)
    book.on_queue(queue("g2", model="other", requests=9, tokens=9000), 0.0)
    assert [(o.instance_id, o.queue_s) for o in overloaded(book, "i1", "i0")] == [("i0", 0.7), ("i1", 0.3)]


def test_the_slack_is_what_the_earliest_has_left_after_its_own_prefill() -> None:
    book = LoadBook(assumed_tokens_per_s=1000.0)
    book.on_load(load(queued_requests=2, queued_tokens=800, oldest_queued_s=0.25), 0.0)
    (one,) = overloaded(book, "i0", slo_ttft_s=2.0)
    assert one.slack_s == pytest.approx(2.0 - 0.25 - 0.4)


def test_the_mean_prompt_is_of_what_waits_at_gateways_else_of_what_arrived_there() -> None:
    book = LoadBook(assumed_tokens_per_s=1000.0)
    book.on_load(load(queued_requests=1, queued_tokens=900), 0.0)
    book.on_queue(queue(arrived=10, arrived_tokens=1000), 0.0)
    assert overloaded(book, "i0")[0].slack_s == pytest.approx(0.9)
    book.on_queue(queue(requests=2, tokens=400, arrived=12, arrived_tokens=1400), 0.0)
    assert overloaded(book, "i0")[0].slack_s == pytest.approx(0.8)


def test_nothing_known_is_no_queue_and_all_the_slack() -> None:
    assert overloaded(LoadBook(), "i0", slo_ttft_s=1.5) == [Overloaded("i0", 0.0, 1.5)]
    assert overloaded(LoadBook()) == []


def test_an_instance_that_reports_nothing_has_its_share_of_the_gateways() -> None:
    book = LoadBook(assumed_tokens_per_s=1000.0)
    book.on_load(load("i0", queued_tokens=500), 0.0)
    book.on_queue(queue(requests=1, tokens=400), 0.0)
    assert [o.queue_s for o in overloaded(book, "i0", "i1")] == [0.7, 0.2]


def test_members_of_pairs_are_marked() -> None:
    found = LoadBook().overloaded("m", ("i0", "i1"), slo_ttft_s=1.0, now_s=0.0, in_pairs={"i1"})
    assert [(o.instance_id, o.live) for o in found] == [("i0", False), ("i1", True)]


def test_only_the_latest_report_counts() -> None:
    book = LoadBook(assumed_tokens_per_s=1000.0)
    for tokens in (900, 100):
        book.on_load(load(queued_tokens=tokens), 0.0)
        book.on_queue(queue(requests=1, tokens=tokens), 0.0)
    assert overloaded(book, "i0")[0].queue_s == pytest.approx(0.2)


def test_the_silent_are_forgotten() -> None:
    book = LoadBook(assumed_tokens_per_s=1000.0)
    book.on_load(load(queued_tokens=500), 0.0)
    book.on_queue(queue(requests=1, tokens=500), 0.0)
    assert overloaded(book, "i0", now_s=REPORT_TTL_S)[0].queue_s == pytest.approx(1.0)
    assert overloaded(book, "i0", now_s=REPORT_TTL_S + 0.01)[0].queue_s == 0.0


def test_a_speed_is_not_measured_across_a_silence() -> None:
    book = LoadBook()
    book.on_load(load(queued_tokens=9, prefill_tokens_total=0, busy_s_total=0.0), 0.0)
    late_s = REPORT_TTL_S + 1
    book.on_load(load(queued_tokens=9, prefill_tokens_total=400, busy_s_total=0.1), late_s)
    assert book.tokens_per_s("m", "i0") == ASSUMED_TOKENS_PER_S
