"""The instance's state table."""

import itertools
from typing import get_args

import pytest

from services.worker.core.lifecycle import IllegalTransition, InstanceLifecycle
from shared.messages.common import InstanceState

STATES = get_args(InstanceState)
ALLOWED = {
    ("spare", "loading"),
    ("loading", "live"),
    ("live", "serving"),
    ("serving", "draining"),
    ("draining", "spare"),
    ("loading", "serving"),
    ("draining", "serving"),
    ("loading", "spare"),
    ("live", "spare"),
    ("failed", "spare"),
    *((state, "failed") for state in ("spare", "loading", "live", "serving", "draining")),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(STATES, STATES)))
def test_exactly_the_moves_of_the_table_are_possible(before, after):
    instance = InstanceLifecycle(before)
    if (before, after) in ALLOWED:
        assert instance.move_to(after) == before
        assert instance.state == after
    else:
        with pytest.raises(IllegalTransition, match=f"from {before} to {after}"):
            instance.move_to(after)
        assert instance.state == before
