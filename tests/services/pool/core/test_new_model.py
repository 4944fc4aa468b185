from __future__ import annotations

import math

import pytest

from services.pool.core.new_model import (
    MAX_KEEP_ALIVE_S,
    MAX_NO_ROOM_TIMEOUT_S,
    MAX_SLO_S,
    MIN_SLO_S,
    check_limits,
    name_of,
)
from shared.engine_args import EngineArgs
from shared.errors import BadRequest
from shared.messages.registry import AddModel


def test_a_model_is_called_as_asked_or_like_its_directory() -> None:
    assert name_of(AddModel(path="/models/llama/")) == "llama"
    assert name_of(AddModel(path="/models/llama", name="org/llama:8b")) == "org/llama:8b"


@pytest.mark.parametrize("name", ["no spaces", "-dash", "x" * 201, "é"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(BadRequest) as refused:
        name_of(AddModel(path="/m", name=name))
    assert refused.value.param == "name"


def test_what_is_in_range_is_taken() -> None:
    check_limits(AddModel(path="/m"))
    check_limits(AddModel(path="/m", slo_ttft_s=MIN_SLO_S, slo_tbt_s=MAX_SLO_S, min_instances=3, max_instances=3))


@pytest.mark.parametrize("param", ["slo_ttft_s", "slo_tbt_s"])
@pytest.mark.parametrize("slo_s", [-0.5, 1e-9, 3601.0, math.inf, -math.inf, math.nan])
def test_objectives_out_of_range_are_refused_by_name_and_value(param: str, slo_s: float) -> None:
    with pytest.raises(BadRequest) as refused:
        check_limits(AddModel(path="/m", **{param: slo_s}))  # type: ignore[arg-type]
    assert refused.value.param == param
    assert f"{slo_s:g}" in refused.value.message


@pytest.mark.parametrize("keep_alive_s", [-1.0, MAX_KEEP_ALIVE_S + 1, math.inf, math.nan])
def test_a_keep_alive_out_of_range_is_refused(keep_alive_s: float) -> None:
    with pytest.raises(BadRequest) as refused:
        check_limits(AddModel(path="/m", min_instances=0, keep_alive_s=keep_alive_s))
    assert refused.value.param == "keep_alive_s"
    assert f"{keep_alive_s:g}" in refused.value.message


@pytest.mark.parametrize("timeout_s", [-1.0, MAX_NO_ROOM_TIMEOUT_S + 1, math.inf, math.nan])
def test_a_patience_out_of_range_is_refused(timeout_s: float) -> None:
    for allowed in (None, 0.0, MAX_NO_ROOM_TIMEOUT_S):
        check_limits(AddModel(path="/m", no_room_timeout_s=allowed))
    with pytest.raises(BadRequest) as refused:
        check_limits(AddModel(path="/m", no_room_timeout_s=timeout_s))
    assert refused.value.param == "no_room_timeout_s"
    assert f"{timeout_s:g}" in refused.value.message


def test_a_model_with_a_keep_alive_keeps_no_instance_for_ever() -> None:
    for keep_alive_s in (0.0, 0.5, MAX_KEEP_ALIVE_S):
        check_limits(AddModel(path="/m", min_instances=0, keep_alive_s=keep_alive_s))
    with pytest.raises(BadRequest, match="min_instances 2") as refused:
        check_limits(AddModel(path="/m", min_instances=2, keep_alive_s=0.5))
    assert refused.value.param == "keep_alive_s"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 1), (2, 3)])
def test_prefill_and_decode_instances_share_the_most(low: int, high: int) -> None:
    check_limits(AddModel(path="/m", serving="disaggregated", min_instances=low, max_instances=high + 1))
    check_limits(AddModel(path="/m", serving="colocated", min_instances=low, max_instances=high))
    with pytest.raises(BadRequest, match=f"{high} is of all roles together") as refused:
        check_limits(AddModel(path="/m", serving="disaggregated", min_instances=low, max_instances=high))
    assert refused.value.param == "max_instances"


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan, 1e7])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    with pytest.raises(BadRequest) as refused:
        check_limits(AddModel(path="/m", weight=weight))
    assert refused.value.param == "weight"


@pytest.mark.parametrize(("low", "high"), [(-1, 2), (3, 2)])
def test_instances_out_of_range_are_refused(low: int, high: int) -> None:
    with pytest.raises(BadRequest) as refused:
        check_limits(AddModel(path="/m", min_instances=low, max_instances=high))
    assert refused.value.param == "min_instances"


def test_an_engine_that_moves_no_kv_serves_in_one_role() -> None:
    check_limits(AddModel(path="/m", engine="vllm", engine_args=EngineArgs(max_num_seqs=4)))
    check_limits(AddModel(path="/m", engine="vllm", serving="colocated"))
    with pytest.raises(BadRequest, match="vllm take no KV") as refused:
        check_limits(AddModel(path="/m", engine="vllm", serving="disaggregated", max_instances=4))
    assert refused.value.param == "served_as"


def test_unknown_engines_and_arguments_without_one_are_refused() -> None:
    with pytest.raises(BadRequest, match="but vllm") as refused:
        check_limits(AddModel(path="/m", engine="sglang"))
    assert refused.value.param == "engine"
    with pytest.raises(BadRequest) as refused:
        check_limits(AddModel(path="/m", engine_args=EngineArgs(max_num_seqs=4)))
    assert refused.value.param == "engine_args"
