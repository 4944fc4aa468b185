"""What vLLM is told of a model, by its record and a worker's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from services.worker.config import WorkerConfig
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.vllm.blitz_vllm import words
from shared.checkpoint import CONFIG_FILES, QUANT_CONFIG_FILE, TOKENIZER_FILE, check_file, read_file
from shared.engine_args import EngineArgs
from shared.errors import BadCheckpoint
from shared.messages.registry import ModelRecord
from shared.model_spec import DTYPE_BYTES

BLOCK_TOKENS = 128
"""vLLM's on CPUs, where a model does not say another."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a started vLLM cannot change any more: of equal ones, one can take the other's weights."""

    kind: str
    """``ModelRecord.kind``: of the layout, the files beside the weights, and what the engine was told."""
    arguments: tuple[tuple[str, int | float | str | bool], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model, for vLLM."""

    path: str
    """Its directory."""
    arguments: Mapping[str, int | float | str | bool]
    """Of vLLM's engine, checked; they are part of ``shape``."""
    tokenizer: words.Tokenizer
    limits: SchedulerConfig
    shape: Shape
    model_hash: str
    num_bytes: int
    """Of its weights."""
    kv_bytes: int
    vocab_size: int
    check: Callable[[], None]
    """Raises ``BlitzError`` unless the directory is as it was registered. Blocks."""

    def start(self, weights: str) -> words.Start:
        """``weights``: the socket where they are; empty: it starts without."""
        return words.Start(
            path=self.path,
            arguments=dict(self.arguments),
            tokenizer=self.tokenizer,
            weights=weights,
            vocab_size=self.vocab_size,
        )


def served_model(record: ModelRecord, config: WorkerConfig) -> ServedModel:
    """Raises ``BadCheckpoint`` where its KV has no room for a block."""
    args, spec = record.engine_args or EngineArgs(), record.basics
    block_size = args.block_size or BLOCK_TOKENS
    kv_bytes = round(args.kv_cache_gib * (1 << 30)) if args.kv_cache_gib is not None else config.kv_bytes
    # Where that is not known, vLLM refuses by itself what it has no room for.
    block_bytes = (
        block_size * spec.kv_bytes_per_token * DTYPE_BYTES.get(args.dtype or "", 0) // DTYPE_BYTES.get(spec.dtype, 2)
    )
    block_bytes = block_bytes or block_size * spec.kv_bytes_per_token
    # One block is vLLM's own.
    num_blocks = kv_bytes // block_bytes - 1 if block_bytes else -(-spec.max_position // block_size)
    if num_blocks < 1:
        raise BadCheckpoint(
            f"two KV blocks of this model have {2 * block_bytes} bytes, and there are {kv_bytes} for KV: raise "
            "kv_cache_gib in its arguments"
        )
    max_num_sequences = args.max_num_seqs or config.max_running_requests
    limits = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        context_tokens=args.max_model_len or spec.max_position,  # which vLLM compares with its own of the model
        max_num_sequences=max_num_sequences,
        # No step of vLLM's is shorter than it has requests.
        max_batch_tokens=max(args.max_num_batched_tokens or config.max_batch_tokens, max_num_sequences),
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
    )
    # Compiled, it would serve minutes later.
    arguments = {"enforce_eager": True} | args.as_mapping()
    arguments |= {"max_model_len": limits.limit_tokens, "max_num_seqs": limits.max_num_sequences}
    arguments |= {"max_num_batched_tokens": limits.max_batch_tokens, "kv_cache_memory_bytes": kv_bytes}
    arguments.pop("kv_cache_gib", None)
    return ServedModel(
        path=record.path,
        arguments=arguments,
        tokenizer=words.Tokenizer(
            file=str(Path(record.path) / TOKENIZER_FILE),
            sha256=next((file.sha256 for file in record.files if file.name == TOKENIZER_FILE), ""),
            end_ids=spec.eos_token_ids,
        ),
        limits=limits,
        shape=Shape(record.kind, tuple(sorted(arguments.items()))),
        model_hash=record.model_hash,
        num_bytes=record.weights_bytes,
        kv_bytes=kv_bytes,
        vocab_size=spec.vocab_size,
        check=partial(_check_files, record),
    )


def _check_files(record: ModelRecord) -> None:
    """vLLM reads the model's configuration itself, and masks are made by its tokenizer. Raises ``CheckpointChanged``,
    ``BadCheckpoint``."""
    for name in (*CONFIG_FILES, QUANT_CONFIG_FILE, TOKENIZER_FILE):
        file = Path(record.path) / name
        check_file(record.files, file, read_file(file))
