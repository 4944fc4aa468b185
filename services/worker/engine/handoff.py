"""What two engines hand each other, as host bytes: the rules that every engine checks.

A batch moves between engines as its hidden states ``[num_tokens, hidden_size]`` and its KV
``[num_layers, 2 (K, V), num_tokens, num_kv_heads, head_dim]``, both in the model's dtype. The KV may also come
as several ranges of layers. Tokens lie sequence after sequence. Which blocks hold them, and how large those are,
is each engine's own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from services.worker.device.completion import Completion
from services.worker.engine.forward_batch import ForwardBatch
from shared.errors import BadRequest
from shared.transport.base import Buffer

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
T = TypeVar("T")


def asked_of(activation: Completion[Any], operation: Completion[T]) -> Completion[T]:
    """``operation``, begun on a batch. How far the batch is it looks at when it runs; where it has run already, this
    raises the ``BadRequest`` of a caller who took the batch to be elsewhere."""
    error = operation.error
    if error is not None and error is not activation.error and isinstance(error, BadRequest):
        raise error
    return operation


def host_bytes(buffer: Buffer, num_bytes: int, what: str) -> Bytes:
    """``buffer`` as flat bytes, without a copy. Raises ``BadRequest`` unless it has ``num_bytes``."""
    flat = np.frombuffer(buffer, dtype=np.uint8)
    check_bytes(len(flat), num_bytes, what)
    return flat


def check_bytes(num_bytes: int, expected: int, what: str) -> None:
    """Raises ``BadRequest`` for another number than is expected."""
    if num_bytes != expected:
        raise BadRequest(f"{what}: {num_bytes} bytes, expected {expected}")


def slots_of(
    block_tables: Sequence[Sequence[int]],
    num_tokens: Sequence[int],
    first_tokens: Sequence[int] = (),
    *,
    block_size: int,
    num_blocks: int,
) -> npt.NDArray[np.int64]:
    """Flat KV slots of positions ``first_tokens[i] .. num_tokens[i]`` of each sequence, one sequence after another;
    without ``first_tokens`` of all from 0 on.

    Raises ``BadRequest`` for another number of tables than of lengths, a table that is too short, a block
    outside of the pool, a range that begins behind its end.
    """
    firsts = first_tokens or [0] * len(num_tokens)
    if not len(block_tables) == len(num_tokens) == len(firsts):
        raise BadRequest(f"{len(block_tables)} block tables for {len(num_tokens)} sequences, {len(firsts)} beginnings")
    slots = [np.empty(0, dtype=np.int64)]
    for index, (block_table, first, count) in enumerate(zip(block_tables, firsts, num_tokens, strict=True)):
        if not 0 <= first <= count <= len(block_table) * block_size:
            raise BadRequest(
                f"sequence {index} of the batch, from {first} on: "
                f"{count} tokens in {len(block_table)} blocks of {block_size}"
            )
        blocks = np.asarray(block_table[: -(-count // block_size)], dtype=np.int64)
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < num_blocks:
            raise BadRequest(
                f"sequence {index} of the batch: blocks {blocks.min()}..{blocks.max()} of a pool of {num_blocks}"
            )
        at = np.arange(count)
        slots.append((blocks[at // block_size] * block_size + at % block_size)[first:])
    return np.concatenate(slots)


def check_batch(batch: ForwardBatch, block_size: int) -> None:
    """Raises ``BadRequest`` for an empty batch, an empty slice, a block table that is too short."""
    if not batch.slices:
        raise BadRequest("a batch without slices")
    for piece in batch.slices:
        end = piece.start + len(piece.token_ids)
        if not len(piece.token_ids) or len(piece.block_table) * block_size < end:
            raise BadRequest(
                f"sequence {piece.sequence_id}: {len(piece.token_ids)} tokens up to position {end} in "
                f"{len(piece.block_table)} blocks of {block_size}"
            )


def check_next_layer(next_layer: int, num_layers: int) -> None:
    """Raises ``BadRequest`` unless a batch can be resumed there: after the last layer its rows are gone."""
    if not 0 <= next_layer < num_layers:
        raise BadRequest(f"a batch cannot be resumed at layer {next_layer} of {num_layers}")


def check_layers(first_layer: int, last_layer: int, num_layers: int) -> None:
    """Raises ``BadRequest`` unless ``first_layer <= i < last_layer`` are layers of the model, or none."""
    if not 0 <= first_layer <= last_layer <= num_layers:
        raise BadRequest(f"KV of layers {first_layer}..{last_layer} of a model of {num_layers}")


def check_next(first: int, last: int, next_layer: int, next_token: int, num_layers: int) -> None:
    """Raises ``BadRequest`` unless layers ``first <= i < last`` follow what has run of a batch."""
    if first != next_layer or next_token or not first <= last <= num_layers:
        raise BadRequest(
            f"layers {first}..{last} of {num_layers}, of a batch whose next layer is {next_layer}, "
            f"where it is at token {next_token}"
        )


def check_whole(next_layer: int, next_token: int, num_layers: int) -> None:
    """Raises ``BadRequest`` inside a layer, and once the last one has run: only the sampled tokens' states are left."""
    if next_token:
        raise BadRequest(f"hidden states of a batch inside layer {next_layer}")
    if next_layer >= num_layers:
        raise BadRequest(f"hidden states of a batch that has run all {num_layers} layers")


def check_part(
    layer: int, begin: int, end: int, *, next_layer: int, next_token: int, num_layers: int, num_tokens: int
) -> None:
    """Raises ``BadRequest`` unless these tokens of this layer follow what has run of a batch."""
    if (layer, begin) != (next_layer, next_token) or not begin < end <= num_tokens or layer >= num_layers:
        raise BadRequest(
            f"tokens {begin}..{end} of layer {layer}: the batch of {num_tokens} is at token {next_token} of layer "
            f"{next_layer} of {num_layers}"
        )


def check_tokens(token_ids: npt.NDArray[np.int64], vocab_size: int) -> None:
    """Raises ``BadRequest`` for a token outside of the vocabulary."""
    if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise BadRequest(f"token ids {token_ids.min()}..{token_ids.max()} of a vocabulary of {vocab_size}")
