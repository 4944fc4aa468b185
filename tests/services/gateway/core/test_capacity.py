from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.core.capacity import GRACE_S, Capacity, WorkerSize
from shared.engine_args import EngineArgs
from shared.errors import Unservable
from shared.messages.registry import ModelRecord
from tests.services.gateway.checkpoint import model_record

RECORD = model_record(Path("/m"))
SPEC, KV = RECORD.spec, RECORD.spec.kv_bytes_per_token
SMALL, LARGE = WorkerSize(999, 64 * KV), WorkerSize(1000, 8 * KV)


def record(**changes: Any) -> ModelRecord:
    return msgspec.structs.replace(RECORD, **changes)


def settled(*sizes: WorkerSize) -> Capacity:
    capacity = Capacity()
    capacity.put(sizes, 0.0)
    return capacity


def test_weights_that_fit_no_worker_are_refused_with_both_sizes_and_the_setting() -> None:
    error = settled(SMALL).refusal(RECORD, GRACE_S)
    assert isinstance(error, Unservable)
    assert error.retry_after_s is None
    assert all(said in error.message for said in ("1000 bytes", "999", "BLITZ_WORKER_ARENA_MIB"))
    assert settled(SMALL, LARGE).refusal(RECORD, GRACE_S) is None


def test_nothing_is_refused_before_the_grace_is_over_or_without_any_worker() -> None:
    assert settled(SMALL).refusal(RECORD, GRACE_S - 0.1) is None
    assert settled(SMALL).context_tokens(RECORD, GRACE_S - 0.1) == SPEC.max_position
    empty = settled()
    assert empty.refusal(RECORD, 1e6) is None
    assert not empty.has_workers
    empty.put([SMALL], 1e6)
    assert empty.refusal(RECORD, 1e6 + GRACE_S - 0.1) is None, "the grace begins with the first worker"
    assert empty.refusal(RECORD, 1e6 + GRACE_S) is not None


def test_a_worker_that_is_gone_counts_until_its_grace_is_over() -> None:
    capacity = settled(SMALL, LARGE)
    capacity.put([SMALL], 100.0)
    capacity.put([SMALL], 110.0)
    capacity.put([SMALL], 100.0 + GRACE_S - 0.1)
    assert capacity.refusal(RECORD, 100.0 + GRACE_S) is None
    capacity.put([SMALL], 100.0 + GRACE_S)
    assert capacity.refusal(RECORD, 100.0 + GRACE_S) is not None


def test_a_worker_that_comes_back_counts_for_good() -> None:
    capacity = settled(SMALL, LARGE)
    capacity.put([SMALL], 100.0)
    capacity.put([SMALL, LARGE], 110.0)
    capacity.put([SMALL, LARGE], 200.0)
    assert capacity.refusal(RECORD, 200.0) is None


def test_when_the_last_workers_vanish_requests_wait() -> None:
    capacity = settled(SMALL)
    capacity.put([], 100.0)
    assert capacity.has_workers
    capacity.put([], 100.0 + GRACE_S)
    assert not capacity.has_workers
    assert capacity.refusal(RECORD, 1e6) is None


def test_a_model_that_may_have_no_instances_is_refused_at_once() -> None:
    error = settled(LARGE).refusal(record(max_instances=0), 0.0)
    assert "max_instances is 0" in str(error)


@pytest.mark.parametrize(("weights_bytes", "tokens"), [(1000, 8), (999, 64), (1, 64), (1001, SPEC.max_position)])
def test_the_context_is_bounded_by_the_workers_that_the_model_fits(weights_bytes: int, tokens: int) -> None:
    found = settled(SMALL, LARGE).context_tokens(record(weights_bytes=weights_bytes), GRACE_S)
    assert found == min(tokens, SPEC.max_position)


def test_a_model_whose_engine_nobody_offers_is_refused_with_the_setting() -> None:
    theirs, offers = record(engine="vllm"), WorkerSize(1000, 8 * KV, ("", "vllm"))
    error = settled(LARGE).refusal(theirs, GRACE_S)
    assert isinstance(error, Unservable)
    assert "none offers the engine vllm (BLITZ_WORKER_ENGINES)" in error.message
    assert settled(LARGE).refusal(theirs, GRACE_S - 0.1) is None
    assert settled(LARGE, offers).refusal(theirs, GRACE_S) is None
    small = WorkerSize(999, 8 * KV, ("", "vllm"))
    found = settled(LARGE, small).refusal(theirs, GRACE_S)
    assert found is not None
    assert "of the workers that offer the engine vllm is 999" in found.message
    assert settled(LARGE, small).refusal(RECORD, GRACE_S) is None


def test_a_model_of_our_engine_is_refused_where_all_workers_have_only_those_of_others() -> None:
    theirs = WorkerSize(1000, 8 * KV, ("vllm",))
    error = settled(theirs).refusal(RECORD, GRACE_S)
    assert error is not None
    assert "none offers the system's own engine (BLITZ_WORKER_ENGINE)" in error.message
    assert settled(theirs).refusal(record(engine="vllm"), GRACE_S) is None
    assert settled(theirs).context_tokens(RECORD, GRACE_S) == SPEC.max_position
    assert settled(theirs, LARGE).refusal(RECORD, GRACE_S) is None


def test_the_context_of_an_engine_of_others_is_its_own_argument() -> None:
    capacity = settled(WorkerSize(1000, 8 * KV, ("", "vllm")))
    assert capacity.context_tokens(RECORD, GRACE_S) == 8
    assert capacity.context_tokens(record(engine="vllm"), GRACE_S) == SPEC.max_position
    args = EngineArgs(max_model_len=5)
    assert capacity.context_tokens(record(engine="vllm", engine_args=args), GRACE_S) == 5
