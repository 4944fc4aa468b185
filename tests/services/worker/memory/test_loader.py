"""Arena and loader: bytes in place, checksums, refused files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file

from services.worker.device.host import HOST
from services.worker.memory.arena import Arena, weights_digest
from services.worker.memory.dtypes import TORCH_DTYPES
from services.worker.memory.loader import load_unit
from shared.checkpoint import Checkpoint, inspect_checkpoint
from shared.errors import BadCheckpoint, BadRequest
from shared.layout import CHECK_BYTES, layout_of
from tests.checkpoints import KINDS, tiny_checkpoint


def _load_all(checkpoint: Checkpoint, arena: Arena) -> list[tuple[int, ...]]:
    for unit in checkpoint.layout.units:
        load_unit(checkpoint, checkpoint.layout, unit, arena)
    return [arena.unit_checksums(unit) for unit in checkpoint.layout.units]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharded", [False, True])
def test_fused_tensors_hold_the_rows_of_their_parts(kind: str, sharded: bool) -> None:
    checkpoint = inspect_checkpoint(tiny_checkpoint(kind, sharded=sharded), with_hash=False)
    arena = Arena(HOST.allocate(checkpoint.num_bytes))
    _load_all(checkpoint, arena)
    files = {file: load_file(file) for file in checkpoint.weight_files}
    for slot in (slot for unit in checkpoint.layout.units for slot in unit.slots):
        view = arena.tensor(slot, "float32")
        expected = [files[checkpoint.tensors[p.checkpoint_name].file][p.checkpoint_name] for p in slot.parts]
        assert torch.equal(view, torch.cat(expected))
        assert view.data_ptr() == arena.address + slot.offset


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_another_dtype_are_cast(dtype: str) -> None:
    checkpoint = inspect_checkpoint(tiny_checkpoint("llama"), with_hash=False)
    spec = replace_dtype(checkpoint, dtype)
    arena = Arena(HOST.allocate(spec.num_bytes))
    _load_all(spec, arena)
    for unit in spec.layout.units:
        slot = unit.slots[0]
        part = slot.parts[0]
        tensor = load_file(spec.tensors[part.checkpoint_name].file)[part.checkpoint_name]
        assert torch.equal(arena.tensor(slot, dtype)[: part.shape[0]], tensor.to(TORCH_DTYPES[dtype]))


def replace_dtype(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """The float32 checkpoint as if its config said ``dtype``."""
    values = {name: getattr(checkpoint.spec, name) for name in checkpoint.spec.__struct_fields__}
    spec = type(checkpoint.spec)(**{**values, "dtype": dtype})
    layout = layout_of(spec)
    return replace(checkpoint, layout=layout, num_bytes=layout.num_bytes)


def test_checksums_depend_on_the_weights_alone_not_on_what_the_arena_held() -> None:
    checkpoint = inspect_checkpoint(tiny_checkpoint("qwen2"), with_hash=False)
    clean, dirty = Arena(HOST.allocate(checkpoint.num_bytes)), Arena(HOST.allocate(checkpoint.num_bytes))
    dirty.memory(0, checkpoint.num_bytes)[:] = 0xAB
    first, second = _load_all(checkpoint, clean), _load_all(checkpoint, dirty)
    assert first == second
    digest = weights_digest(np.concatenate(first))
    assert digest == weights_digest(np.concatenate(second))
    assert len(digest) == 32
    dirty.memory(5, 1)[:] ^= 1
    assert dirty.unit_checksums(checkpoint.layout.units[0]) != first[0]
    assert digest != weights_digest(np.concatenate(first[::-1]))


def test_there_is_one_checksum_for_each_piece_of_a_unit() -> None:
    layout = inspect_checkpoint(tiny_checkpoint("llama"), with_hash=False).layout
    arena = Arena(HOST.allocate(2 * CHECK_BYTES))
    arena.memory(0, 2 * CHECK_BYTES)[:] = np.arange(2 * CHECK_BYTES) % 251
    unit = replace(layout.units[0], offset=4096, num_bytes=CHECK_BYTES + 4096)
    raw = bytes(arena.memory(4096, CHECK_BYTES + 4096))
    expected = (xxhash.xxh3_64_intdigest(raw[:CHECK_BYTES]), xxhash.xxh3_64_intdigest(raw[CHECK_BYTES:]))
    assert arena.unit_checksums(unit) == expected


def test_released_pages_read_as_zeros_at_the_same_address() -> None:
    arena = Arena(HOST.allocate(1 << 20))
    layout = inspect_checkpoint(tiny_checkpoint("llama"), with_hash=False).layout
    view, address = arena.tensor(layout.units[0].slots[0], "float32"), arena.address
    arena.memory(0, 1 << 20)[:] = 7
    arena.release()
    assert not arena.memory(0, 1 << 20).any()
    assert not view.any()
    arena.memory(0, 1 << 20)[:] = 1
    assert view.any()
    assert arena.address == address


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 1), (0, 4097), (4096, 1), (0, -1)])
def test_memory_outside_of_the_arena_is_refused(offset: int, num_bytes: int) -> None:
    with pytest.raises(BadRequest, match="outside"):
        Arena(HOST.allocate(4096)).memory(offset, num_bytes)


def test_a_file_truncated_after_inspection_is_named(tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "copy"))
    checkpoint = inspect_checkpoint(path, with_hash=False)
    arena = Arena(HOST.allocate(checkpoint.num_bytes))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: tensor model\.norm\.weight: the file ends at byte"):
        _load_all(checkpoint, arena)
    file.unlink()
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: cannot be opened"):
        _load_all(checkpoint, arena)


def test_a_foreign_layout_or_a_small_arena_is_refused() -> None:
    llama, qwen = (inspect_checkpoint(tiny_checkpoint(kind), with_hash=False) for kind in ("llama", "qwen2"))
    arena = Arena(HOST.allocate(llama.num_bytes))
    with pytest.raises(BadRequest, match="layout"):
        load_unit(llama, qwen.layout, qwen.layout.units[0], arena)
    with pytest.raises(BadRequest, match="does not fit"):
        load_unit(llama, llama.layout, llama.layout.units[0], Arena(HOST.allocate(llama.num_bytes - 1)))
