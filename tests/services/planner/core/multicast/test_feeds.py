from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.multicast.feeds import NEARLY, feed_of
from services.planner.core.multicast.targets import fair_rate
from services.planner.core.multicast.traffic import Source

FULL_GBPS = 256.0
GIGABITS = 128.0
"""Half a second at full rate."""


def loading(name: str, ready_s: float) -> Source:
    return Source(name, ready_s=ready_s, near_only=True)


def feed(*copies: Source, **sending: list[float]) -> dict[str, float]:
    return dict(feed_of(copies, sending, FULL_GBPS, GIGABITS).sources)


def test_an_idle_copy_feeds_before_one_that_loads() -> None:
    assert feed(loading("a", 0.1), Source("b")) == {"b": FULL_GBPS}


def test_the_end_of_a_chain_that_loads_feeds_before_a_copy_that_sends() -> None:
    assert feed(Source("a"), loading("b", 0.4), a=[FULL_GBPS]) == {"b": FULL_GBPS}


def test_a_copy_that_sends_feeds_before_one_that_loads_slowly() -> None:
    assert feed(Source("a"), loading("b", 9.0), a=[FULL_GBPS]) == {"a": FULL_GBPS / 2}


def test_the_members_of_a_group_feed_with_what_their_all_gather_leaves() -> None:
    members = [loading(name, 0.4) for name in "bc"]
    rates = feed(Source("a"), *members, a=[FULL_GBPS], b=[FULL_GBPS / 2], c=[FULL_GBPS / 2])
    assert rates == {"b": FULL_GBPS / 2, "c": FULL_GBPS / 2}


def test_without_stripes_a_single_gpu_feeds() -> None:
    copies = [Source("a"), Source("b")]
    sending = {"a": [FULL_GBPS / 2], "b": [FULL_GBPS / 4]}
    assert feed_of(copies, sending, FULL_GBPS, GIGABITS, sharded=False).sources == (("b", 0.75 * FULL_GBPS),)


def test_of_busy_copies_the_least_busy_is_shared() -> None:
    assert feed(Source("a"), Source("b"), a=[FULL_GBPS] * 3, b=[FULL_GBPS]) == {"b": FULL_GBPS / 2}


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.0, 0.1, 0.5, 2.0]),
            st.lists(st.sampled_from([32.0, 64.0, 128.0, 256.0, math.inf]), max_size=3),
        ),
        min_size=1,
        max_size=8,
    ),
    st.booleans(),
)
def test_no_single_gpu_would_be_sooner_and_none_sends_more_than_its_link_gives(
    held: list[tuple[float, list[float]]], sharded: bool
) -> None:
    copies = [Source(f"g{i}", ready_s=ready_s) for i, (ready_s, _) in enumerate(held)]
    sending = {f"g{i}": wanted for i, (_, wanted) in enumerate(held) if wanted}
    made = feed_of(copies, sending, FULL_GBPS, GIGABITS, sharded=sharded)
    given_gbps = {name: fair_rate([*sending.get(name, ()), math.inf], FULL_GBPS) for name, _ in made.sources}
    assert all(0 < gbps <= min(FULL_GBPS, given_gbps[name]) + 1e-9 for name, gbps in made.sources)
    assert sum(gbps for _, gbps in made.sources) <= FULL_GBPS + 1e-9
    assert sharded or len(made.sources) == 1
    ready_s = {copy.holder: copy.ready_s for copy in copies}
    assert made.finish_s == pytest.approx(
        max(
            GIGABITS / sum(gbps for _, gbps in made.sources),
            *[ready_s[name] for name, _ in made.sources],
        )
    )
    for copy in copies:
        rate = min(FULL_GBPS, fair_rate([*sending.get(copy.holder, ()), math.inf], FULL_GBPS))
        alone_s = max(copy.ready_s, GIGABITS / rate)
        assert made.finish_s <= alone_s / (1 - NEARLY) + NEARLY * GIGABITS / FULL_GBPS + 1e-9
