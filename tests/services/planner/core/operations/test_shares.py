"""Who gets the spare workers where there are fewer than are lacking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.operations.decision import ModelStanding, ScaleRequest
from services.planner.core.operations.shares import Lack, shares
from shared.messages.common import Role


def lack(
    name: str, missing: int, there: int = 0, *, role: Role = "colocated", least: int = 0, weight: float = 1.0
) -> Lack:
    has = there > 0 or role == "decode"
    request = ScaleRequest(name, there + missing, 0.0, "load", role=role, deficit=missing / max(there, 1))
    return Lack(request, ModelStanding(has, there < least, weight=weight), there, least, missing)


@pytest.mark.parametrize(
    ("lacks", "num_spare", "got"),
    [
        # The first instance of each before the second of any.
        ([lack("a", 50), lack("b", 1), lack("c", 3)], 3, [1, 1, 1]),
        # A role does not wait until the other has all that it lacks.
        ([lack("m", 8, role="prefill"), lack("m", 4, role="decode")], 4, [2, 2]),
        ([lack("m", 8, 2, role="prefill"), lack("m", 2, 2, role="decode")], 4, [3, 1]),
        ([lack("m", 8, 2, role="prefill"), lack("m", 8, 2, role="decode")], 5, [2, 3]),
        # The minimum, but not what is wanted beyond it, comes first.
        ([lack("a", 6, 1, least=2), lack("b", 8, 1)], 3, [1, 2]),
        ([lack("a", 4, 1, weight=3.0), lack("b", 4, 1)], 4, [3, 1]),
        # What one does not need is left to the others.
        ([lack("a", 9, 1), lack("b", 1, 4), lack("c", 0, 1)], 12, [9, 1, 0]),
        ([], 3, []),
    ],
)
def test_one_worker_after_the_other_goes_to_who_lacks_most_by_then(
    lacks: list[Lack], num_spare: int, got: list[int]
) -> None:
    assert shares(lacks, num_spare) == got


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 3)), max_size=6), st.integers(0, 20))
def test_all_are_given_that_can_be_used_and_nobody_without_an_instance_is_passed_over(
    models: list[tuple[int, int, int]], num_spare: int
) -> None:
    lacks = [lack(f"m{i}", missing, there, least=least) for i, (there, missing, least) in enumerate(models)]
    got = shares(lacks, num_spare)
    assert sum(got) == min(num_spare, sum(one.missing for one in lacks))
    assert all(0 <= share <= one.missing for share, one in zip(got, lacks, strict=True))
    waits = any(one.missing and not one.there and not share for share, one in zip(got, lacks, strict=True))
    beyond = [one.there + share > max(1, one.least) for share, one in zip(got, lacks, strict=True) if share]
    assert not (waits and any(beyond))
