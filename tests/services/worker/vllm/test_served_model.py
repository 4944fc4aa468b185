"""What vLLM is told of a model."""

from __future__ import annotations

import msgspec
import pytest

from services.pool.inspection import record_of
from services.worker.vllm.served_model import served_model
from shared.checkpoint import inspect_checkpoint
from shared.engine_args import EngineArgs
from shared.errors import BadCheckpoint
from shared.messages.registry import ModelRecord
from tests.checkpoints import VOCAB_SIZE, tiny_checkpoint
from tests.services.workers import worker_config

GIB = 1 << 30


def record(**arguments: object) -> ModelRecord:
    made = record_of(inspect_checkpoint(tiny_checkpoint("llama"), generic=True), "vllm")
    return msgspec.structs.replace(made, engine_args=EngineArgs(**arguments))  # type: ignore[arg-type]


def test_memory_for_kv_is_what_the_model_asks_for_or_else_the_workers() -> None:
    config = worker_config("w", kv_bytes=GIB // 4)
    for asked, kv_bytes in ((None, GIB // 4), (1.5, GIB * 3 // 2), (0.125, GIB // 8)):
        model = served_model(record(kv_cache_gib=asked), config)
        assert model.kv_bytes == model.arguments["kv_cache_memory_bytes"] == kv_bytes
        block_bytes = model.limits.block_size * record().basics.kv_bytes_per_token
        assert model.limits.num_blocks == kv_bytes // block_bytes - 1, "one is vLLM's own"
    with pytest.raises(BadCheckpoint, match="raise kv_cache_gib"):
        served_model(record(kv_cache_gib=1e-6), config)


def test_of_other_arguments_it_is_another_shape() -> None:
    small, large = worker_config("w", kv_bytes=GIB), worker_config("w", kv_bytes=2 * GIB)
    assert served_model(record(), small).shape == served_model(record(), small).shape
    assert served_model(record(), small).shape != served_model(record(), large).shape
    assert served_model(record(kv_cache_gib=1), small).shape == served_model(record(kv_cache_gib=1), large).shape


def test_limits_count_with_the_steps_that_vllm_makes() -> None:
    model = served_model(record(max_num_seqs=4096, max_num_batched_tokens=512), worker_config("w", kv_bytes=GIB))
    assert model.limits.max_batch_tokens == model.arguments["max_num_batched_tokens"] == 4096


def test_it_is_told_which_tokens_there_are() -> None:
    assert served_model(record(), worker_config("w", kv_bytes=GIB)).start("").vocab_size == VOCAB_SIZE
