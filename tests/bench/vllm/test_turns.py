from __future__ import annotations

from typing import Literal

import pytest

from bench.streamed import Streamed
from bench.vllm.turns import VllmTurns, VllmTurnsResult, engine_of, weights_of
from shared.errors import BadRequest
from shared.messages.operations import ScaleRecord, TargetRecord


def record(model: str, direction: Literal["in", "out"] = "out", *, targets: int = 1) -> ScaleRecord:
    return ScaleRecord(
        plan_id="p",
        model=model,
        status="done",
        direction=direction,
        desired=1,
        reason="",
        triggered_at_s=0.0,
        targets=tuple(TargetRecord(worker_id="w", instance_id="i") for _ in range(targets)),
    )


def answers(*texts: str, error: str = "") -> tuple[Streamed, ...]:
    """Sent a second after each other, answered within two; the last one fails with ``error``."""
    made = [Streamed(number, text, (1.0, 2.0), "", 100.0 + number) for number, text in enumerate(texts)]
    if error:
        made[-1] = Streamed(made[-1].number, "", (), error, made[-1].sent_s)
    return tuple(made)


def test_each_request_wants_another_model_and_engines_alternate() -> None:
    setting = VllmTurns(models=5, turns=2, at_a_time=5)
    assert setting.names == ("vllm-0", "torch-1", "vllm-2", "torch-3", "vllm-4")
    assert setting.order == (0, 1, 2, 3, 4, 0, 1, 2, 3, 4)
    assert [weights_of(number) for number in range(5)] == [0, 0, 1, 1, 2]
    assert [engine_of(number) for number in range(3)] == ["vllm", "torch", "vllm"]


@pytest.mark.parametrize("models", [3, 21])
def test_models_are_more_than_workers(models: int) -> None:
    with pytest.raises(BadRequest, match="more than the 3 workers"):
        VllmTurns(models=models, turns=1, at_a_time=1)


def test_times_are_from_the_first_request_and_loads_are_of_engines() -> None:
    records = (
        record("vllm-0"),
        record("torch-1"),
        record("vllm-0"),
        record("vllm-2", "in"),
        record("torch-3", targets=0),
    )
    found = VllmTurnsResult(VllmTurns(4, 2, 4), answers(*"aabb" * 2), records).document()
    assert (found["all_answered_s"], found["total_s"]) == (5.0, 9.0)
    assert (found["vllm_loads"], found["torch_loads"]) == (2, 1)
    assert (found["vllm_ttft_p50_s"], found["torch_ttft_max_s"]) == (1.0, 1.0)
    assert (found["requests"], found["failed"], found["same_texts"]) == (8, 0, True)


def test_another_text_is_noticed_of_another_turn_and_of_the_other_engine() -> None:
    setting = VllmTurns(4, 2, 4)
    for said in ("aabbacbb", "abccabcc"):
        assert not VllmTurnsResult(setting, answers(*said), ()).document()["same_texts"]


def test_what_failed_is_counted_and_has_no_text() -> None:
    found = VllmTurnsResult(VllmTurns(4, 1, 4), answers(*"aabb", error="503: no room"), ()).document()
    assert (found["failed"], found["errors"], found["same_texts"]) == (1, ["503: no room"], True)
    assert found["total_s"] == 4.0
