"""The layout of tags: whatever the epoch, kinds of transfers do not meet."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product

import pytest

from shared.transport.control import CONTROL_TAG
from shared.transport.tags import MAX_NUMBER, Carries, carried_by, tag_of


def epoch_of(year: int, month: int = 1, day: int = 1) -> int:
    """As leases begin to count: milliseconds since 2025."""
    return int((datetime(year, month, day, tzinfo=UTC) - datetime(2025, 1, 1, tzinfo=UTC)).total_seconds() * 1000)


EDGES = (
    *(0, 1, epoch_of(2027)),
    *(epoch + step for epoch in (1 << 37, 1 << 38, 1 << 39) for step in (-1, 0, 1)),
    *(epoch_of(year, month) for year in (2029, 2033, 2042, 2100) for month in (1, 6, 12)),
)
"""The bits above 37 come into use in May 2029, September 2033 and June 2042."""
NUMBERS = (0, 1, 1 << 18, MAX_NUMBER)


@pytest.mark.parametrize("carries", Carries)
def test_a_tag_says_what_its_transfer_carries(carries: Carries) -> None:
    assert {carried_by(tag_of(epoch, number, carries)) for epoch, number in product(EDGES, NUMBERS)} == {carries}


@pytest.mark.parametrize("epoch", EDGES)
def test_kinds_of_transfers_never_meet_whatever_the_year(epoch: int) -> None:
    for others in product(Carries, EDGES):
        carries, other = others
        theirs = {tag_of(other, number, carries) for number in NUMBERS}
        for mine in set(Carries) - {carries}:
            assert not theirs & {tag_of(epoch, number, mine) for number in NUMBERS}, (mine, others)


@pytest.mark.parametrize("epoch", EDGES)
def test_no_tag_has_the_transports_own_bit(epoch: int) -> None:
    for carries, number in product(Carries, NUMBERS):
        assert 0 <= tag_of(epoch, number, carries) < CONTROL_TAG == 1 << 63


@pytest.mark.parametrize("epoch", EDGES)
def test_leases_of_some_years_have_tags_of_their_own(epoch: int) -> None:
    year_ms = 365 * 24 * 3600 * 1000
    near = [epoch + step for step in (0, 1, 1000, year_ms, 4 * year_ms)]
    tags = {tag_of(e, number, carries) for e, number, carries in product(near, NUMBERS, Carries)}
    assert len(tags) == len(near) * len(NUMBERS) * len(Carries)


@pytest.mark.parametrize(("transfer", "number"), [(-1, 0), (0, -1), (0, MAX_NUMBER + 1)])
def test_what_has_no_place_in_a_tag_is_refused(transfer: int, number: int) -> None:
    with pytest.raises(ValueError, match=r"negative|24-bit"):
        tag_of(transfer, number)
