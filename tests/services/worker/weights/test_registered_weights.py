"""What a worker computes with, or counts as a copy, is what was registered, wherever it comes from."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from services.pool.inspection import Inspections
from services.worker.memory.pieces import Piece, cut
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.pace import Pace, Paces
from shared import subjects
from shared.checkpoint import Checkpoint, inspect_checkpoint
from shared.errors import CheckpointChanged, Conflict, TransportError
from shared.layout import CHECK_BYTES
from shared.messages.common import Ack
from shared.messages.copies import CanRead, HoldCopy
from tests.processes import process
from tests.services.worker.lone_worker import LoneWorker, lone_worker
from tests.services.worker.weights.changed_checkpoint import copy_of_tiny, flip_on_disk, overwrite, write_wide
from tests.services.worker.weights.feeding_peers import DISK, empty_copy, peers, same_bytes
from tests.services.workers import MIB
from tests.wait_until import eventually

UNITS = range(4)
"""Of ``wide``: two layers, embedding, norm."""
SEEDS = range(3)


# --- a worker ------------------------------------------------------------------------------------


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[LoneWorker]:
    """A worker, and a model of its own as a pool registered it."""
    inspections = Inspections()
    async with lone_worker(host_cache_bytes=4 * MIB) as alone:
        found = await inspections.inspect(copy_of_tiny(tmp_path / "model"))
        alone.model = msgspec.structs.replace(found, name="m")
        yield alone
    await inspections.close()


async def test_weights_that_were_overwritten_serve_nobody(alone: LoneWorker) -> None:
    overwrite(Path(alone.model.path))
    plan = alone.plan(epoch=10)
    await alone.publish(plan)
    await eventually(lambda: bool({"failed", "serving"} & set(alone.events(plan.plan_id))))
    [failed] = [p for p in alone.progress if p.event == "failed"]
    assert "model.safetensors: layer 0 is not what was registered" in failed.detail
    assert not [p for p in alone.progress if p.event in ("layer_ready", "serving")]


async def test_weights_that_were_overwritten_are_no_host_copy(alone: LoneWorker) -> None:
    overwrite(Path(alone.model.path))
    request = HoldCopy(model=alone.model, epoch=1000, sources=())
    await alone.planner.request(subjects.worker_hold_copy(process("w0")), request, Ack, timeout_s=60)
    await eventually(lambda: not alone.worker.service.parts.store.report())
    await eventually(lambda: alone.pool.heartbeats[-1].host_copies == ())
    assert not [c for h in alone.pool.heartbeats for c in h.host_copies if c.state == "ready"]


async def test_a_changed_config_is_named_and_nothing_is_read(alone: LoneWorker) -> None:
    config = Path(alone.model.path) / "config.json"
    config.write_bytes(config.read_bytes() + b"\n")
    plan = alone.plan(epoch=10)
    await alone.publish(plan)
    await eventually(lambda: bool({"failed", "serving"} & set(alone.events(plan.plan_id))))
    [failed] = [p for p in alone.progress if p.event == "failed"]
    assert "config.json has changed since the model was registered" in failed.detail
    with pytest.raises(CheckpointChanged, match=r"config\.json"):
        await alone.planner.request(
            subjects.worker_can_read(process("w0")), CanRead(model=alone.model), Ack, timeout_s=60.0
        )


async def test_a_record_without_digests_is_not_loaded(alone: LoneWorker) -> None:
    plan = alone.plan(epoch=10, model=msgspec.structs.replace(alone.model, unit_digests=""))
    await alone.publish(plan)
    await alone.reported(plan.plan_id, "failed")
    assert alone.events(plan.plan_id) == ["failed"]


# --- disk ----------------------------------------------------------------------------------------


@pytest.fixture
def wide(tmp_path: Path) -> Checkpoint:
    """A registered checkpoint that the test may change."""
    checkpoint = inspect_checkpoint(write_wide(tmp_path / "wide"))
    assert len(checkpoint.layout.units) == len(UNITS)
    assert checkpoint.layout.units[0].num_bytes > 2 * CHECK_BYTES
    return checkpoint


async def test_an_overwritten_checkpoint_is_refused_by_name(wide: Checkpoint) -> None:
    overwrite(wide.path)
    async with peers(1, checkpoint=wide) as (_, (target,)):
        with pytest.raises(CheckpointChanged, match=r"model\.safetensors: layer 0 is not what was registered"):
            await target.receive([[DISK]], path=str(wide.path))
        assert target.ready == []


async def test_what_others_forwarded_and_disk_make_no_copy_of_two_versions(wide: Checkpoint) -> None:
    async with peers(2, checkpoint=wide) as (_, (source, target)):
        await source.receive([[DISK]], path=str(wide.path))
        overwrite(wide.path)
        for piece in (p for p in cut(wide.layout, CHECK_BYTES) if p.unit < 2):
            target.copy.copy_piece(piece, source.copy)
            target.copy.arrived(piece)
        with pytest.raises(CheckpointChanged, match=r"model\.safetensors: embed is not what was registered"):
            await target.receive([[DISK]], path=str(wide.path))
        assert not target.copy.complete
        assert not {2, 3} & set(target.ready)


async def test_a_host_with_a_stale_checkpoint_takes_the_weights_from_a_peer(wide: Checkpoint, tmp_path: Path) -> None:
    stale = write_wide(tmp_path / "stale")
    overwrite(stale)
    async with peers(2, checkpoint=wide) as (_, (source, target)):
        await source.receive([[DISK]], path=str(wide.path))
        await target.receive([[DISK, source.upstream()]], path=str(stale))
        assert same_bytes(target.copy, source.copy)


async def test_a_stale_stripe_comes_from_a_peer_and_leaves_the_others_alone(wide: Checkpoint, tmp_path: Path) -> None:
    stale = write_wide(tmp_path / "stale")
    overwrite(stale)
    async with peers(2, checkpoint=wide) as (_, (source, target)):
        await source.receive([[DISK]], path=str(wide.path))
        await target.receive([[source.upstream()], [DISK, source.upstream()]], path=str(stale))
        assert same_bytes(target.copy, source.copy)
        assert target.fetched == [], "nothing of it arrived"


async def test_what_a_stale_disk_overwrote_of_a_peers_pieces_is_asked_for_anew(
    wide: Checkpoint, tmp_path: Path
) -> None:
    stale = write_wide(tmp_path / "stale")
    overwrite(stale)
    async with peers(2, checkpoint=wide) as (_, (source, target)):
        await source.receive([[DISK]], path=str(wide.path))
        for unit in (0, 1):
            first = next(p for p in cut(wide.layout, CHECK_BYTES) if p.unit == unit)
            target.copy.copy_piece(first, source.copy)
            target.copy.arrived(first)
        await target.receive([[DISK, source.upstream()]], path=str(stale))
        assert same_bytes(target.copy, source.copy)
        assert target.fetched == [], "no block was bad when its unit was verified"


async def test_a_file_that_is_replaced_during_a_load_is_refused(wide: Checkpoint) -> None:
    waits = itertools.count()

    async def replace_before_the_second_unit(_: float) -> None:
        if next(waits) == 1:
            overwrite(wide.path)

    pace = Pace(1.0, clock=lambda: 0.0, sleep=replace_before_the_second_unit)
    async with peers(1, checkpoint=wide) as (_, (target,)):
        with pytest.raises(CheckpointChanged, match=r"model\.safetensors: layer 1 is not what was registered"):
            await target.receive([[DISK]], path=str(wide.path), paces=Paces(disk=pace))
        assert not target.copy.complete


# --- one byte ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("unit", UNITS)
async def test_a_byte_that_changed_on_disk_is_found(wide: Checkpoint, unit: int, seed: int) -> None:
    changed = wide.layout.units[unit]
    flip_on_disk(wide, changed, random.Random(seed))
    async with peers(1, checkpoint=wide) as (_, (target,)):
        with pytest.raises(CheckpointChanged, match=f"{changed.name} is not what was registered"):
            await target.receive([[DISK]], path=str(wide.path))
        assert unit not in target.ready


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("unit", UNITS)
async def test_a_byte_that_changed_in_a_host_copy_is_found(
    wide: Checkpoint, unit: int, seed: int, is_local: bool
) -> None:
    draw, changed = random.Random(seed), wide.layout.units[unit]
    async with peers(2, checkpoint=wide) as (_, (source, target)):
        await source.receive([[DISK]], path=str(wide.path))
        source.copy.arena.memory(changed.offset + draw.randrange(changed.num_bytes), 1)[0] ^= 1 << draw.randrange(8)
        holder = target if is_local else source
        holder.offer("host", source.copy)
        with pytest.raises(TransportError, match=f"{changed.name} is not what was registered"):
            await target.receive([[holder.upstream("local" if is_local else "host")]])
        assert unit not in target.ready


@pytest.mark.parametrize("is_checksums", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("unit", UNITS)
async def test_a_byte_that_changed_on_the_wire_is_found_and_fetched_again(
    wide: Checkpoint, unit: int, seed: int, is_checksums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    pieces = [p for p in cut(wide.layout, CHECK_BYTES) if p.unit == unit and p.is_checksums == is_checksums]
    spoiled = draw.choice(pieces)
    arrived = WeightCopy.arrived

    async with peers(2, checkpoint=wide) as (_, (source, target)):
        await source.receive([[DISK]], path=str(wide.path))

        def spoil(copy: WeightCopy, piece: Piece) -> bool:
            if copy is target.copy and piece == spoiled:
                copy.buffer(piece)[draw.randrange(piece.num_bytes)] ^= 1 << draw.randrange(8)
            return arrived(copy, piece)

        monkeypatch.setattr(WeightCopy, "arrived", spoil)
        await target.receive([[source.upstream()]])
        assert same_bytes(target.copy, source.copy)
        assert [u for _, u, _ in target.fetched] == ([] if is_checksums else [unit])


# --- whoever sends -------------------------------------------------------------------------------


async def test_checksums_and_weights_of_another_version_are_not_taken_from_a_peer(
    wide: Checkpoint, tmp_path: Path
) -> None:
    write_wide(tmp_path / "other")
    overwrite(tmp_path / "other")
    other = inspect_checkpoint(tmp_path / "other")
    async with peers(1, checkpoint=other) as (_, (apart,)):
        await apart.receive([[DISK]], path=str(other.path))
    async with peers(3, apart.copy, checkpoint=wide) as (_, (wrong, right, target)):
        with pytest.raises(TransportError, match="layer 0 is not what was registered"):
            await target.receive([[wrong.upstream()]])
        assert target.ready == []
        await right.receive([[DISK]], path=str(wide.path))
        target.epoch += 100
        await target.receive([[wrong.upstream(), right.upstream()]])
        assert same_bytes(target.copy, right.copy)


def test_no_unit_is_ready_without_the_checksums_that_were_registered(wide: Checkpoint) -> None:
    copy = empty_copy(wide)
    for unit in UNITS:
        with pytest.raises(TransportError, match="registered"):
            copy.mark_ready(unit)
    assert copy.layers_ready == 0


def test_digests_of_another_number_of_units_are_refused(wide: Checkpoint) -> None:
    with pytest.raises(Conflict, match="add it again"):
        WeightCopy(wide.layout, empty_copy(wide).arena, wide.unit_digests[:-1])
