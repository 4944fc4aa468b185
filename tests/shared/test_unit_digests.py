"""The pool's digests are of the very bytes that workers have in their arenas."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.device.host import HOST
from services.worker.memory.arena import Arena
from services.worker.memory.loader import load_unit
from shared.checkpoint import inspect_checkpoint
from shared.unit_digests import DIGEST_DIGITS, block_checksums, hash_units, unit_digest
from tests.checkpoints import KINDS, tiny_checkpoint
from tests.services.worker.weights.changed_checkpoint import write_wide


def check(path: Path) -> None:
    checkpoint = inspect_checkpoint(path, with_hash=False)
    arena = Arena(HOST.allocate(checkpoint.num_bytes))
    arena.memory(0, checkpoint.num_bytes)[:] = 0xA5
    loaded = []
    for unit in checkpoint.layout.units:
        load_unit(checkpoint, checkpoint.layout, unit, arena)
        loaded.append(unit_digest(arena.unit_checksums(unit)))
    assert [unit.digest for unit in hash_units(checkpoint.layout, checkpoint.tensors)] == loaded
    assert inspect_checkpoint(path).unit_digests == "".join(loaded)
    assert all(len(digest) == DIGEST_DIGITS for digest in loaded)
    assert len(set(loaded)) == len(loaded)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharded", [False, True])
def test_digests_are_of_what_is_loaded(kind: str, sharded: bool) -> None:
    check(tiny_checkpoint(kind, sharded=sharded))


@pytest.mark.parametrize("served", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_digests_are_of_what_is_loaded_where_it_is_cast(dtype: str, served: str, tmp_path: Path) -> None:
    check(write_wide(tmp_path, dtype=dtype, served=served))


def test_a_digest_depends_on_each_checksum_and_their_order() -> None:
    digests = {unit_digest(c) for c in ((1, 2), (2, 1), (1, 3), (1,), (1, 2, 0), (2**64 - 1, 2))}
    assert len(digests) == 6
    assert unit_digest(block_checksums(bytes(5))) == unit_digest(list(block_checksums(bytes(5))))
