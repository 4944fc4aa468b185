"""What one failure takes together."""

from __future__ import annotations

import pytest

from shared.failure_domains import FailureDomain, shared_domain
from shared.messages.registry import WorkerInfo
from tests.records import worker

A = worker("a", host="x")
BESIDE, ELSEWHERE = worker("b", host="x"), worker("c", host="y")


@pytest.mark.parametrize(
    ("others", "domain"),
    [
        ((), FailureDomain.NONE),
        ((A,), FailureDomain.WORKER),
        ((BESIDE,), FailureDomain.HOST),
        ((A, BESIDE), FailureDomain.HOST),
        ((BESIDE, A), FailureDomain.HOST),
        ((ELSEWHERE,), FailureDomain.NONE),
        ((A, ELSEWHERE), FailureDomain.NONE),
        ((BESIDE, A, ELSEWHERE), FailureDomain.NONE),
    ],
)
def test_it_is_the_smallest_that_has_them_all(others: tuple[WorkerInfo, ...], domain: FailureDomain) -> None:
    assert shared_domain(A, others) is domain


def test_the_lower_is_the_safer() -> None:
    assert FailureDomain.NONE < FailureDomain.HOST < FailureDomain.WORKER
