"""Checkpoints are read beside the registry; long ones are asked for more than once."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.pool import inspection
from services.pool.inspection import Inspections
from shared.checkpoint import Checkpoint, inspect_checkpoint
from shared.errors import BadCheckpoint, InProgress, Overloaded
from tests.checkpoints import tiny_checkpoint
from tests.wait_until import WAIT_S


@pytest.fixture
async def inspections() -> AsyncIterator[Inspections]:
    made = Inspections()
    yield made
    await made.close()


async def test_a_large_checkpoint_is_read_in_a_process_of_its_own(
    inspections: Inspections, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(inspection, "SMALL_BYTES", 0)
    path = tiny_checkpoint("llama")
    found, expected = await inspections.inspect(path, wait_s=WAIT_S), inspect_checkpoint(path)
    assert (found.model_hash, found.layout_hash, found.spec) == (
        expected.model_hash,
        expected.layout.hash,
        expected.spec,
    )
    assert (found.unit_digests, found.files) == (expected.unit_digests, expected.files)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        await inspections.inspect(tmp_path, wait_s=WAIT_S)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "model.safetensors"])
async def test_much_json_is_read_in_a_process_of_its_own_and_no_error_is_as_long(
    inspections: Inspections, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str
) -> None:
    def never(path: Path, *, generic: bool) -> Checkpoint:
        raise AssertionError(f"{path} is read in this process")

    monkeypatch.setattr(inspection, "inspect_checkpoint", never)
    long = b'{"architectures": "' + b"x" * 2_000_000 + b'"}'
    (tmp_path / "config.json").write_bytes(b'{"architectures": 1}')
    header = len(long).to_bytes(8, "little") if file == "model.safetensors" else b""
    (tmp_path / file).write_bytes(header + long)
    with pytest.raises(BadCheckpoint) as refused:
        await inspections.inspect(tmp_path, wait_s=WAIT_S)
    assert len(refused.value.message) < 3000


async def test_who_asks_again_gets_what_goes_on(inspections: Inspections, monkeypatch: pytest.MonkeyPatch) -> None:
    read, begun = threading.Event(), list[Path]()

    def slow(path: Path, *, generic: bool) -> Checkpoint:
        begun.append(path)
        read.wait(WAIT_S)
        return inspect_checkpoint(path)

    monkeypatch.setattr(inspection, "inspect_checkpoint", slow)
    path = tiny_checkpoint("llama")
    with pytest.raises(InProgress):
        await inspections.inspect(path, wait_s=0.02)
    again = asyncio.create_task(inspections.inspect(path, wait_s=WAIT_S))
    await asyncio.sleep(0.02)
    read.set()
    assert (await again).path == str(path)
    assert begun == [path], "read once"


async def test_checkpoints_that_wait_are_bounded(inspections: Inspections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MAX_WAITING", 1)
    over = threading.Event()

    def for_ever(path: Path, *, generic: bool) -> Checkpoint:
        over.wait(WAIT_S)
        raise BadCheckpoint(f"{path} was never read")

    monkeypatch.setattr(inspection, "inspect_checkpoint", for_ever)
    with pytest.raises(InProgress):
        await inspections.inspect(Path("/a"), wait_s=0.01)
    with pytest.raises(Overloaded):
        await inspections.inspect(Path("/b"), wait_s=0.01)
    over.set()


async def test_checkpoints_that_were_read_keep_nobody_waiting(
    inspections: Inspections, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(inspection, "MAX_WAITING", 2)
    source = tiny_checkpoint("llama")
    paths = [tmp_path / f"model-{index}" for index in range(5)]
    for path in paths:
        path.symlink_to(source)
        # Each is read before the next one is asked for; what was found of the others is still kept.
        assert (await inspections.inspect(path)).model_hash


@pytest.mark.parametrize("small_bytes", [0, 1 << 30])
async def test_code_of_a_checkpoints_own_is_refused_where_an_engine_of_others_serves_it(
    inspections: Inspections, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_bytes: int
) -> None:
    monkeypatch.setattr(inspection, "SMALL_BYTES", small_bytes)
    path = tmp_path / "llama"
    shutil.copytree(tiny_checkpoint("llama"), path)
    assert (await inspections.inspect(path, "vllm", wait_s=WAIT_S)).engine == "vllm"
    config = json.loads((path / "config.json").read_text())
    for name, value in {
        "auto_map": {"AutoConfig": "own.Config"},
        "speculators_config": {"verifier": {}},
        "configuration_files": ["config.1.0.0.json"],
    }.items():
        (path / "config.json").write_text(json.dumps(config | {name: value}))
        other = Inspections()
        assert (await other.inspect(path, wait_s=WAIT_S)).engine == ""
        with pytest.raises(BadCheckpoint, match=name):
            await other.inspect(path, "vllm", wait_s=WAIT_S)
        await other.close()
