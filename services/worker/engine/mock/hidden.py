"""The mock's hidden states: each token's first bytes say which token it is and how many layers are done."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.worker.engine.handoff import Bytes, host_bytes
from shared.transport.base import Buffer

_MAGIC = 0x51A7
_RECORD = np.dtype([("magic", "<u2"), ("layers_done", "<u2"), ("token_digest", "<u4")])
HIDDEN_MIN_BYTES = _RECORD.itemsize
"""Least size of one token's hidden state."""


def _records(token_ids: Sequence[int], layers_done: int) -> npt.NDArray[np.void]:
    ids = np.asarray(token_ids, dtype=np.int64)
    records = np.empty(len(ids), dtype=_RECORD)
    records["magic"] = _MAGIC
    records["layers_done"] = layers_done
    records["token_digest"] = ((ids + 1) * 0x9E3779B1) & 0xFFFFFFFF
    return records


def hidden_of(token_ids: Sequence[int], layers_done: int, bytes_per_token: int) -> Bytes:
    """Flat bytes of ``[num_tokens, bytes_per_token]``."""
    records = _records(token_ids, layers_done)
    hidden = np.zeros((len(records), bytes_per_token), dtype=np.uint8)
    hidden[:, :HIDDEN_MIN_BYTES] = records.view(np.uint8).reshape(len(records), HIDDEN_MIN_BYTES)
    return hidden.reshape(-1)


def check_hidden(hidden: Buffer, token_ids: Sequence[int], layers_done: int, bytes_per_token: int) -> None:
    """Raises ``BadRequest`` for another size, ``RuntimeError`` for other tokens or another number of layers."""
    flat = host_bytes(hidden, len(token_ids) * bytes_per_token, "hidden states")
    heads = np.ascontiguousarray(flat.reshape(-1, bytes_per_token)[:, :HIDDEN_MIN_BYTES])
    found, expected = heads.view(_RECORD)[:, 0], _records(token_ids, layers_done)
    if not np.array_equal(found, expected):
        row = int((found != expected).argmax())
        raise RuntimeError(
            f"a batch resumed at layer {layers_done}: row {row} of the hidden states says {found[row]} "
            f"instead of {expected[row]} {_RECORD.names}"
        )
