"""What a model may set of its engine, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.request_bodies.engine_args import MAX_BYTES, read_engine_args
from shared.engine_args import EngineArgs
from shared.errors import BadRequest, PayloadTooLarge

ALL: dict[str, Any] = {
    "max_model_len": 8192,
    "dtype": "bfloat16",
    "kv_cache_gib": 4,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "block_size": 16,
    "quantization": "fp8_e4m3-x",
}


def test_all_that_there_are_are_read() -> None:
    read = read_engine_args("vllm", ALL)
    assert read is not None
    assert read.as_mapping() == ALL
    assert set(ALL) == set(EngineArgs.__struct_fields__)
    assert read_engine_args("vllm", {"kv_cache_gib": 0.25}) == EngineArgs(kv_cache_gib=0.25)


@pytest.mark.parametrize("given", [None, {}, {"max_num_seqs": None}])
def test_none_are_none(given: dict[str, Any] | None) -> None:
    assert read_engine_args("vllm", given) is None
    assert read_engine_args("", {}) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("trust_remote_code", "code that is not its own"),
        ("trust-remote-code", "code that is not its own"),
        ("hf_overrides", "code that is not its own"),
        ("worker_cls", "code that is not its own"),
        ("kv_transfer_config", "a host, a path or an address"),
        ("tokenizer", "a host, a path or an address"),
        ("load_format", "the worker sets it"),
        ("seed", "not one of those that can be set"),
        ("", "not one of those that can be set"),
    ],
)
def test_what_names_code_paths_or_hosts_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why) as refused:
        read_engine_args("vllm", {"max_num_seqs": 4, name: None})
    assert refused.value.param == f"engine_args.{name}"
    assert "max_model_len, dtype" in refused.value.message


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_model_len", [0, -1, 2**31 + 1, 10**30, -(10**399), True, 1.5, "8192", [1]]),
        ("dtype", ["int4", "", 16, {}]),
        ("kv_cache_gib", [0, -1, 1e6, 10**399, True, "4"]),
        ("enforce_eager", [0, 1, "true"]),
        ("block_size", [0, 8192]),
        ("quantization", ["", "a b", "a/b", "a.b", "fp8\n", "x" * 65, 8, "é"]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(BadRequest) as refused:
            read_engine_args("vllm", {name: value})
        assert refused.value.param == f"engine_args.{name}", value


def test_they_are_of_engines_of_others_and_bounded() -> None:
    with pytest.raises(BadRequest, match="another engine") as refused:
        read_engine_args("", {"max_num_seqs": 4})
    assert refused.value.param == "engine_args"
    with pytest.raises(PayloadTooLarge) as too_large:
        read_engine_args("vllm", {"quantization": "x" * MAX_BYTES})
    assert too_large.value.param == "engine_args"
    with pytest.raises(BadRequest) as refused:
        read_engine_args("vllm", {"x" * 10_000: 1})
    assert len(refused.value.message) + len(refused.value.param or "") < 600
