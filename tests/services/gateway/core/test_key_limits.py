from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.key_limits import FRESH_S, KeyLimits, Limits, pages
from shared.errors import BadRequest, RateLimitExceeded
from shared.messages.load import KeyUsage, KeyUsageReport


def limited(gateway_id: str = "gw", **limits: int) -> KeyLimits:
    keys = KeyLimits(gateway_id)
    keys.set_limits({"a": Limits(**limits)}, 0.0)
    return keys


def admitted(keys: KeyLimits, now_s: float, *, requests: int = 1, tokens: int = 1) -> bool:
    try:
        keys.charge("a", now_s, requests=requests, tokens=tokens)
    except RateLimitExceeded:
        return False
    return True


def tell(one: KeyLimits, other: KeyLimits, now_s: float, *, name: str = "gw-1", incarnation: str = "1") -> None:
    rows = tuple(one.usage(now_s))
    other.take(KeyUsageReport(gateway_id=name, incarnation=incarnation, keys=rows), now_s)


def test_a_minutes_worth_of_requests_is_admitted_and_then_one_as_each_has_come_back() -> None:
    keys = limited(requests_per_minute=60)
    assert [admitted(keys, 0.0) for _ in range(61)] == [True] * 60 + [False]
    assert not admitted(keys, 0.9)
    assert admitted(keys, 1.0)
    assert not admitted(keys, 1.0)


def test_the_time_to_retry_is_when_there_is_room() -> None:
    keys = limited(requests_per_minute=600, tokens_per_minute=6000)
    keys.charge("a", 0.0, requests=1, tokens=6000)
    with pytest.raises(RateLimitExceeded, match="6000 tokens per minute") as caught:
        keys.charge("a", 0.0, requests=1, tokens=500)
    assert (caught.value.limit, caught.value.retry_after_s) == ("tokens", 5.0)
    assert not admitted(keys, 4.99, tokens=500)
    assert admitted(keys, 5.0, tokens=500)


def test_tokens_that_were_not_used_come_back_at_the_end() -> None:
    keys = limited(tokens_per_minute=100)
    charge = keys.charge("a", 0.0, requests=1, tokens=90)
    assert charge is not None
    assert not admitted(keys, 0.0, tokens=50)
    keys.settle(charge, 30, 0.0)
    assert admitted(keys, 0.0, tokens=70)
    assert not admitted(keys, 0.0, tokens=1)


def test_requests_at_a_time_are_bounded_and_the_wait_follows_from_how_long_they_take() -> None:
    keys = limited(max_concurrent_requests=2)
    charges = [keys.charge("a", 0.0, requests=1, tokens=1) for _ in range(2)]
    with pytest.raises(RateLimitExceeded, match="2 requests at a time") as caught:
        keys.check("a", 0.0)
    assert caught.value.limit == "concurrent"
    first_wait_s = caught.value.retry_after_s
    assert charges[0] is not None
    keys.settle(charges[0], 0, 30.0)
    assert admitted(keys, 30.0)
    with pytest.raises(RateLimitExceeded) as caught:
        keys.check("a", 30.0)
    assert first_wait_s is not None
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > first_wait_s


@pytest.mark.parametrize(
    ("limits", "requests", "tokens"),
    [({"tokens_per_minute": 10}, 1, 11), ({"requests_per_minute": 2}, 3, 1), ({"max_concurrent_requests": 2}, 3, 1)],
)
def test_what_a_key_can_never_have_is_a_bad_request(limits: dict[str, int], requests: int, tokens: int) -> None:
    with pytest.raises(BadRequest, match="'a' may"):
        limited(**limits).charge("a", 0.0, requests=requests, tokens=tokens)


def test_a_refused_request_is_not_charged() -> None:
    keys = limited(requests_per_minute=10, tokens_per_minute=10, max_concurrent_requests=5)
    keys.charge("a", 0.0, requests=1, tokens=10)
    for _ in range(20):
        assert not admitted(keys, 0.0, tokens=5)
    assert keys.open_requests("a") == 1
    requests, _ = keys.status("a", 0.0)
    assert requests is not None
    assert requests.remaining == 9


def test_keys_without_an_entry_are_not_limited() -> None:
    keys = limited(requests_per_minute=1)
    assert all(keys.charge("other", 0.0, requests=9, tokens=10**9) is None for _ in range(9))
    assert keys.usage(0.0) == []


def test_gateways_share_a_limit() -> None:
    one, other = (limited(name, requests_per_minute=100, max_concurrent_requests=90) for name in ("gw-1", "gw-2"))
    for _ in range(60):
        one.charge("a", 0.0, requests=1, tokens=1)
    tell(one, other, 0.0)
    assert sum(admitted(other, 0.0) for _ in range(100)) == 30
    tell(other, one, 0.0, name="gw-2")
    with pytest.raises(RateLimitExceeded) as caught:
        one.check("a", 0.0)
    assert caught.value.limit == "concurrent"


def test_what_gateways_admit_between_two_reports_is_paid_back() -> None:
    one, other = (limited(name, requests_per_minute=60) for name in ("gw-1", "gw-2"))
    for keys, name, there in ((one, "gw-1", other), (other, "gw-2", one)):
        keys.charge("a", 0.0, requests=1, tokens=1)
        tell(keys, there, 0.0, name=name)
    # Both see 58 left, and use them at once.
    assert sum(admitted(one, 0.0) for _ in range(60)) == 58
    assert sum(admitted(other, 0.0) for _ in range(60)) == 58
    tell(one, other, 0.1)
    tell(other, one, 0.1, name="gw-2")
    # 58 too many: nobody admits anything before they have come back.
    assert not admitted(one, 57.0)
    assert not admitted(other, 57.0)
    assert admitted(one, 59.5)


def test_tokens_that_come_back_at_one_gateway_come_back_everywhere() -> None:
    one, other = (limited(name, tokens_per_minute=100) for name in ("gw-1", "gw-2"))
    charge = one.charge("a", 0.0, requests=1, tokens=100)
    assert charge is not None
    tell(one, other, 0.0)
    assert not admitted(other, 0.0, tokens=50)
    one.settle(charge, 10, 0.0)
    tell(one, other, 0.0)
    assert admitted(other, 0.0, tokens=90)
    assert not admitted(other, 0.0, tokens=1)


def test_a_gateway_that_starts_has_no_more_left_than_the_others() -> None:
    one = limited("gw-1", requests_per_minute=60)
    for _ in range(50):
        one.charge("a", 0.0, requests=1, tokens=1)
    tell(one, limited("gw-2", requests_per_minute=60), 0.0)
    new = limited("gw-2", requests_per_minute=60)
    tell(one, new, 0.0)
    assert sum(admitted(new, 0.0) for _ in range(60)) == 10


def test_a_gateway_that_was_started_again_is_not_charged_for_twice() -> None:
    old, other = (limited(name, requests_per_minute=60) for name in ("gw-1", "gw-2"))
    for _ in range(40):
        old.charge("a", 0.0, requests=1, tokens=1)
    tell(old, other, 0.0)
    again = limited("gw-1", requests_per_minute=60)
    again.charge("a", 0.0, requests=1, tokens=1)
    tell(again, other, 0.0, incarnation="2")
    assert sum(admitted(other, 0.0) for _ in range(60)) == 20


def test_requests_of_a_gateway_that_is_gone_are_not_open_for_ever() -> None:
    one, other = (limited(name, max_concurrent_requests=1) for name in ("gw-1", "gw-2"))
    one.charge("a", 0.0, requests=1, tokens=1)
    tell(one, other, 0.0)
    assert not admitted(other, FRESH_S)
    assert admitted(other, FRESH_S + 0.1)


def test_usage_is_told_while_a_request_is_open_and_for_a_while_after() -> None:
    keys = limited(max_concurrent_requests=9)
    charge = keys.charge("a", 0.0, requests=1, tokens=1)
    assert charge is not None
    assert [row.open_requests for row in keys.usage(500.0)] == [1]
    keys.settle(charge, 1, 500.0)
    assert [row.open_requests for row in keys.usage(500.5)] == [0]
    assert keys.usage(501.5) == []


def test_new_limits_keep_what_was_used() -> None:
    keys = limited(requests_per_minute=60)
    for _ in range(50):
        keys.charge("a", 0.0, requests=1, tokens=1)
    keys.set_limits({"a": Limits(requests_per_minute=55)}, 0.0)
    assert sum(admitted(keys, 0.0) for _ in range(60)) == 5
    keys.set_limits({"a": Limits(requests_per_minute=60)}, 0.0)
    assert sum(admitted(keys, 0.0) for _ in range(60)) == 5


def test_a_key_that_is_taken_away_with_requests_open_leaves_nothing_behind() -> None:
    keys = limited(max_concurrent_requests=2)
    charge = keys.charge("a", 0.0, requests=1, tokens=1)
    assert charge is not None
    keys.set_limits({}, 0.0)
    assert keys.usage(0.0) == []
    keys.settle(charge, 1, 0.0)
    keys.set_limits({"a": Limits(max_concurrent_requests=2)}, 0.0)
    keys.settle(charge, 1, 0.0)
    assert keys.open_requests("a") == 0


def test_rows_come_in_messages_of_a_bounded_size() -> None:
    names = {f"k{number}": Limits(requests_per_minute=1) for number in range(25)}
    keys = KeyLimits("gw")
    keys.set_limits(names, 0.0)
    for name in names:
        keys.charge(name, 0.0, requests=1, tokens=1)
    assert [len(page) for page in pages(keys.usage(0.0), 10)] == [10, 10, 5]


@given(
    steps=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 1), st.integers(1, 40), st.integers(0, 40)), max_size=60)
)
def test_in_the_long_run_gateways_together_admit_no_more_than_the_limit(
    steps: list[tuple[float, int, int, int]],
) -> None:
    """Each step's admission is told before the next: then there is no overshoot at all."""
    both = [limited(f"gw-{number}", tokens_per_minute=100) for number in range(2)]
    now_s, spent = 0.0, 0.0
    for number in (0, 1):
        tell(both[number], both[1 - number], now_s, name=f"gw-{number}")
    for pause_s, number, tokens, used in steps:
        now_s += pause_s
        try:
            charge = both[number].charge("a", now_s, requests=1, tokens=tokens)
        except RateLimitExceeded:
            continue
        assert charge is not None
        spent += min(used, tokens)
        tell(both[number], both[1 - number], now_s, name=f"gw-{number}")
        both[number].settle(charge, min(used, tokens), now_s)
        tell(both[number], both[1 - number], now_s, name=f"gw-{number}")
        assert spent <= 100 + now_s * 100 / 60 + 1e-6


def test_no_report_shuts_a_key_out_for_longer_than_an_hour() -> None:
    keys = limited(requests_per_minute=60)
    for total in (0, 2**53):
        row = KeyUsage(name="a", requests_total=total, tokens_total=0, open_requests=0)
        keys.take(KeyUsageReport(gateway_id="odd", incarnation="1", keys=(row,)), 0.0)
    assert not admitted(keys, 60.0)
    assert admitted(keys, 62 * 60.0)
