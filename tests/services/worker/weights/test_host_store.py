from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from services.worker.memory.arena import Arena
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights import host_store
from services.worker.weights.host_store import HostStore
from shared.errors import Conflict, DeadlineExceeded, NoCapacity, NotFound
from shared.layout import layout_of
from shared.messages.registry import ModelRecord
from tests.records import model, spec

BYTES = layout_of(spec()).num_bytes


def store(copies: float) -> HostStore:
    return HostStore(int(copies * BYTES))


def complete(copy: WeightCopy) -> None:
    for unit in range(len(copy.layout.units)):
        assert copy.seal(unit)
        copy.mark_ready(unit)


def ready(held: HostStore, name: str, *, cached: bool = False, now_s: float = 0.0) -> ModelRecord:
    record = model(name)
    complete(held.reserve(record, cached=cached, now_s=now_s))
    return record


def names(held: HostStore) -> list[str]:
    return [copy.model for copy in held.report()]


def test_a_copy_takes_exactly_its_layouts_bytes_and_says_how_far_it_is() -> None:
    held = store(1)
    record = model("a")
    copy = held.reserve(record, cached=False, now_s=0.0)
    assert copy.arena.capacity_bytes == BYTES == held.used_bytes
    [report] = held.report()
    assert (report.model, report.model_hash, report.num_bytes) == ("a", "hash-of-a", BYTES)
    assert (report.state, report.cached) == ("loading", False)
    complete(copy)
    assert held.report()[0].state == "ready"
    assert held.find("hash-of-a", record.layout_hash) is copy
    assert held.record("hash-of-a") == record


def test_a_copy_of_another_layout_is_not_found_and_not_reserved() -> None:
    held = store(1)
    ready(held, "a")
    assert held.find("hash-of-a", "other") is None
    assert held.find("hash-of-b", model("b").layout_hash) is None
    with pytest.raises(Conflict):
        held.reserve(model("b", layout_hash="other"), cached=False, now_s=0.0)


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    held = store(1.5)
    ready(held, "a")
    with pytest.raises(NoCapacity, match="b needs"):
        held.reserve(model("b"), cached=False, now_s=1.0)
    assert names(held) == ["a"]


def test_a_placed_copy_never_evicts() -> None:
    held = store(1)
    ready(held, "a", cached=True)
    with pytest.raises(NoCapacity):
        held.reserve(model("b"), cached=False, now_s=100.0)
    assert names(held) == ["a"]


async def test_the_least_recently_used_cached_copy_is_to_make_way_and_none_goes_unasked() -> None:
    held = store(3)
    ready(held, "placed")
    ready(held, "a", cached=True, now_s=1.0)
    ready(held, "b", cached=True, now_s=2.0)
    held.touch("hash-of-a", 3.0)
    assert held.evictable(BYTES) == ("hash-of-b",)
    with pytest.raises(NoCapacity):
        held.reserve(model("c"), cached=True, now_s=4.0)
    assert names(held) == ["a", "b", "placed"]
    await held.drop("hash-of-b")
    ready(held, "c", cached=True, now_s=4.0)
    assert names(held) == ["a", "c", "placed"]


def test_memory_that_the_system_does_not_give_is_no_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> Arena:
        raise OSError(12, "Cannot allocate memory")

    held = store(1)
    monkeypatch.setattr(host_store, "Arena", refuse)
    with pytest.raises(NoCapacity, match="Cannot allocate"):
        held.reserve(model("a"), cached=False, now_s=0.0)
    assert held.used_bytes == 0


def test_pinned_and_placed_copies_are_not_evicted() -> None:
    held = store(2)
    ready(held, "placed")
    ready(held, "a", cached=True)
    with held.pinned("hash-of-a"), pytest.raises(NoCapacity):
        held.reserve(model("b"), cached=True, now_s=1.0)
    assert names(held) == ["a", "placed"]


def test_nothing_is_evicted_for_a_copy_that_cannot_fit_anyway() -> None:
    held = store(2)
    ready(held, "placed")
    ready(held, "a", cached=True)
    assert held.evictable(2 * BYTES) == ()


def test_a_cached_copy_becomes_placed_without_loading_again() -> None:
    held = store(1)
    record = ready(held, "a", cached=True)
    copy = held.reserve(record, cached=False, now_s=1.0)
    assert copy.complete
    assert not held.report()[0].cached
    held.reserve(record, cached=True, now_s=2.0)
    assert not held.report()[0].cached


async def test_a_drop_waits_for_readers_and_then_frees() -> None:
    held = store(1)
    record = ready(held, "a")
    with contextlib.ExitStack() as pins:
        pins.enter_context(held.pinned("hash-of-a"))
        pins.enter_context(held.pinned("hash-of-a"))
        dropping = asyncio.create_task(held.drop("hash-of-a"))
        await asyncio.sleep(0.01)
        assert held.report()[0].state == "retired"
        assert held.find("hash-of-a", record.layout_hash) is None
        with pytest.raises(Conflict):
            held.reserve(record, cached=False, now_s=1.0)
        assert not dropping.done()
    assert await asyncio.wait_for(dropping, 1.0)
    assert held.used_bytes == 0
    assert not await held.drop("hash-of-a")
    with pytest.raises(NotFound), held.pinned("hash-of-a"):
        pass


async def test_pages_are_given_back_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as that takes, their bytes are used, and the copy cannot be held again, read or kept."""
    held = store(1)
    record = ready(held, "a")
    releasing, go_on = asyncio.Event(), threading.Event()
    loop, release = asyncio.get_running_loop(), Arena.release

    def slow(arena: Arena) -> None:
        loop.call_soon_threadsafe(releasing.set)
        assert go_on.wait(30.0)
        release(arena)

    monkeypatch.setattr(Arena, "release", slow)
    dropping = asyncio.create_task(held.drop("hash-of-a"))
    await asyncio.wait_for(releasing.wait(), 30.0)
    held.keep("hash-of-a")
    assert held.used_bytes == BYTES
    with pytest.raises(Conflict):
        held.reserve(record, cached=False, now_s=1.0)
    with pytest.raises(NotFound), held.pinned("hash-of-a"):
        pass
    assert not await held.drop("hash-of-a")
    go_on.set()
    assert await dropping
    assert held.used_bytes == 0


async def test_a_drop_gives_up_after_its_time_and_keeps_the_memory() -> None:
    held = store(1)
    ready(held, "a")
    with held.pinned("hash-of-a"), pytest.raises(DeadlineExceeded, match="still in use"):
        await held.drop("hash-of-a", timeout_s=0.02)
    assert held.report()[0].state == "retired"
    assert held.used_bytes == BYTES


async def test_a_refused_retirement_is_undone() -> None:
    held = store(1)
    record = ready(held, "a")
    serial = held.report()[0].serial
    held.retire("hash-of-a")
    assert held.report()[0].state == "retired"
    assert held.find("hash-of-a", record.layout_hash) is None
    held.keep("hash-of-a")
    assert held.find("hash-of-a", record.layout_hash) is not None
    assert held.report()[0].serial > serial, "a registry that let it go, and was not heard, counts it again"
    held.retire("hash-of-b")
    assert [copy.model_hash for copy in held.report()] == ["hash-of-a"]


async def test_a_drop_that_is_taken_back_frees_nothing() -> None:
    held = store(1)
    ready(held, "a")
    with held.pinned("hash-of-a"):
        dropping = asyncio.create_task(held.drop("hash-of-a"))
        await asyncio.sleep(0.01)
        held.keep("hash-of-a")
        assert not await asyncio.wait_for(dropping, 1.0)
    assert held.report()[0].state == "ready"


async def test_a_model_that_is_held_again_has_another_serial() -> None:
    held = store(1)
    ready(held, "a")
    first = held.report()[0].serial
    await held.drop("hash-of-a")
    ready(held, "a")
    assert held.report()[0].serial != first


async def test_freed_memory_goes_back_even_while_a_view_of_it_lives() -> None:
    held = store(1)
    copy = held.reserve(model("a"), cached=False, now_s=0.0)
    view = copy.arena.memory(0, 4096)
    view[:] = b"\x01" * 4096 if isinstance(view, memoryview) else 1
    await held.drop("hash-of-a")
    assert bytes(view) == bytes(4096)
