from __future__ import annotations

import msgspec
import pytest

from bench.prefix import computed as module
from bench.prefix.computed import Computed, since
from shared.messages.load import LoadReport
from tests.services.gateway.core.routing import load_report


def report(instance_id: str, tokens: int, *, model: str = "m") -> LoadReport:
    return msgspec.structs.replace(load_report(instance_id), model=model, prefill_tokens_total=tokens)


async def test_the_latest_report_of_each_instance_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    computed = Computed()
    assert computed.of("m") == {}
    for one in (report("a", 10), report("b", 5), report("a", 30), report("c", 7, model="other")):
        computed.on_load(one)
    earlier = computed.of("m")
    assert earlier == {"a": 30, "b": 5}
    computed.on_load(report("b", 8))
    computed.on_load(report("late", 100))
    assert since(earlier, await computed.settled("m")) == {"a": 0, "b": 3, "late": 100}
