"""Which model's engine a spare worker is to have waiting."""

from __future__ import annotations

from msgspec.structs import replace

from services.pool.core.models import Models
from services.pool.core.table import Version
from shared.messages.registry import ModelRecord, WarmEngine, WorkerHeartbeat
from tests.records import model, worker


def heartbeat(worker_id: str = "w1", **fields: object) -> WorkerHeartbeat:
    able = worker(worker_id, engines=("vllm",))
    return WorkerHeartbeat(**{"worker": able, "state": "spare", "instance": None, "sequence": 1, **fields})  # type: ignore[arg-type]


def warm(name: str, layout_hash: str = "l", **fields: object) -> ModelRecord:
    record = replace(model(name), engine="vllm", warm=True, layout_hash=layout_hash, weights_bytes=1)
    return replace(record, **fields)


def models(*records: ModelRecord) -> Models:
    found = Models(Version())
    for record in records:
        found.put(record)
    return found


def test_a_spare_worker_that_offers_the_engine_prepares_it() -> None:
    record = warm("m")
    known = models(record, replace(record, name="cold", warm=False, layout_hash="other"))
    assert known.to_prepare(heartbeat()) == record
    assert known.to_prepare(heartbeat(state="loading")) is None
    assert known.to_prepare(heartbeat(stopping=True)) is None
    assert known.to_prepare(heartbeat(worker=worker("w1"))) is None
    has = WarmEngine(kind=record.kind, model_hash="", takes_others=True)
    assert known.to_prepare(heartbeat(warm=has)) is None
    assert known.to_prepare(heartbeat(warm=replace(has, kind="another"))) == record
    assert models(warm("m", weights_bytes=1 << 60)).to_prepare(heartbeat()) is None


def test_what_is_changed_or_removed_is_prepared_no_more() -> None:
    record = warm("m")
    known = models(record)
    known.put(replace(record, warm=False))
    assert known.to_prepare(heartbeat()) is None
    known.put(record)
    assert known.to_prepare(heartbeat()) == record
    known.remove("m", 1.0)
    assert known.to_prepare(heartbeat()) is None


def test_workers_share_the_models_among_them() -> None:
    known = models(*(warm(f"m{n}", f"l{n}") for n in range(4)))
    chosen = [known.to_prepare(heartbeat(f"w{n}")) for n in range(100)]
    counts = [sum(record is not None and record.name == f"m{n}" for record in chosen) for n in range(4)]
    assert min(counts) >= 10
    assert chosen[:10] == [known.to_prepare(heartbeat(f"w{n}")) for n in range(10)]
