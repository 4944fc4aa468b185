"""Tokenizers come when their models do, or when first used, once for all who wait, and go when they are not used."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.gateway import tokenizer
from services.gateway.service import Gateway
from services.gateway.tokenizer import ModelTokenizer, TokenizerStore, load_tokenizer
from shared.errors import BadCheckpoint, CheckpointChanged
from shared.messages.registry import FileDigest, ModelRecord
from tests.services.gateway.checkpoint import model_record, write_checkpoint
from tests.services.gateway.cluster import FakePool
from tests.services.gateway.conftest import CONFIG
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import eventually

MIB = 1024 * 1024


@dataclass
class Loads:
    """What was loaded, and in which threads."""

    folders: list[str] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    seen = Loads()

    def noted(folder: Path, registered: Sequence[FileDigest]) -> ModelTokenizer:
        seen.folders.append(folder.name)
        seen.threads.add(threading.current_thread().name)
        return load_tokenizer(folder, registered)

    monkeypatch.setattr(tokenizer, "load_tokenizer", noted)
    return seen


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(clock: Clock) -> AsyncIterator[TokenizerStore]:
    store = TokenizerStore(max_bytes=2 * MIB, idle_s=60.0, clock=clock)
    yield store
    await store.close()


@pytest.fixture
def records(tmp_path: Path) -> list[ModelRecord]:
    return [model_record(write_checkpoint(tmp_path / name), name) for name in ("a", "b", "c")]


async def test_all_who_wait_share_one_load_in_a_thread(
    store: TokenizerStore, records: list[ModelRecord], loads: Loads
) -> None:
    tokenizers = await asyncio.gather(*(store.get(records[0]) for _ in range(20)))
    assert len(set(map(id, tokenizers))) == 1
    assert loads.folders == ["a"]
    assert threading.main_thread().name not in loads.threads


async def test_the_one_not_used_for_the_longest_time_makes_room(
    store: TokenizerStore, records: list[ModelRecord], loads: Loads
) -> None:
    for index in (0, 1, 0, 2):
        await store.get(records[index])
    assert (len(store), store.num_bytes) == (2, 2 * MIB)
    await store.get(records[0])
    assert loads.folders == ["a", "b", "c"]
    await store.get(records[1])
    assert loads.folders == ["a", "b", "c", "b"]


async def test_unused_ones_go_after_a_while(store: TokenizerStore, records: list[ModelRecord], clock: Clock) -> None:
    await store.get(records[0])
    clock.now_s = 50.0
    await store.get(records[1])
    clock.now_s = 61.0
    store.sweep()
    assert (len(store), store.num_bytes) == (1, MIB)


async def test_those_of_other_models_go_and_a_load_that_somebody_waits_for_ends(
    store: TokenizerStore, records: list[ModelRecord]
) -> None:
    waiting = asyncio.create_task(store.get(records[0]))
    await asyncio.sleep(0)
    store.follow(records[1:])
    assert await waiting
    assert (len(store), store.num_bytes) == (0, 0)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
async def test_a_file_that_is_not_the_registered_one_is_not_used(
    store: TokenizerStore, records: list[ModelRecord], name: str
) -> None:
    file = Path(records[0].path) / name
    before = file.read_bytes() if file.exists() else None
    for changed in ((before or b"") + b"\n", None):
        if changed is None:
            file.unlink()
        else:
            file.write_bytes(changed)
        if changed != before:
            with pytest.raises(CheckpointChanged, match=f"/{name} (has changed|came later|is not there any more)"):
                await store.get(records[0])
    if before is not None:
        file.write_bytes(before)
    assert await store.get(records[0]), "it is as it was"


async def test_a_failed_load_is_tried_again(store: TokenizerStore, records: list[ModelRecord], loads: Loads) -> None:
    path = Path(records[0].path) / "tokenizer.json"
    content = path.read_text()
    path.write_text("{")
    for _ in range(2):
        with pytest.raises(BadCheckpoint):
            await store.get(records[0])
    path.write_text(content)
    assert await store.get(records[0])
    assert loads.folders == ["a"] * 3


async def test_those_of_new_models_are_loaded_in_a_thread_while_half_of_the_memory_is_free(
    store: TokenizerStore, records: list[ModelRecord], loads: Loads
) -> None:
    running = asyncio.create_task(store.run())
    store.follow(records)
    await eventually(lambda: store.num_bytes == MIB)
    store.follow(records)
    await asyncio.gather(*(store.get(record) for record in records[:2]))
    assert loads.folders == ["a", "b"]
    assert threading.main_thread().name not in loads.threads
    store.follow([])
    assert (len(store), store.num_bytes) == (0, 0)
    store.follow(records[2:])
    await eventually(lambda: store.num_bytes == MIB)
    assert loads.folders == ["a", "b", "c"]
    running.cancel()


async def test_a_model_whose_files_are_bad_is_no_reason_not_to_load_those_of_the_next(
    store: TokenizerStore, records: list[ModelRecord], loads: Loads
) -> None:
    (Path(records[0].path) / "tokenizer.json").write_bytes(b"\xff")
    (Path(records[1].path) / "tokenizer.json").unlink()
    running = asyncio.create_task(store.run())
    store.follow(records)
    await eventually(lambda: store.num_bytes == MIB)
    assert loads.folders == ["a", "b", "c"]
    running.cancel()


async def test_a_gateway_loads_the_tokenizer_of_a_model_that_nobody_has_asked_for(records: list[ModelRecord]) -> None:
    broker = MemoryBroker()
    await FakePool(broker, records[:1], []).start()
    gateway = Gateway(broker.bus("gateway"), CONFIG)
    running = asyncio.create_task(gateway.run())
    await eventually(lambda: gateway.tokenizers.num_bytes > 0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
