"""Which workers are to be free, and for how long that is remembered."""

from __future__ import annotations

import pytest

from services.pool.core import cordons as module
from services.pool.core.cordons import RETENTION_S, Cordons
from shared.errors import Overloaded


def test_one_is_forgotten_long_after_its_worker_lived_and_not_before() -> None:
    cordons = Cordons()
    cordons.add("lives", 0.0)
    cordons.add("gone", 0.0)
    assert cordons.forget(lambda name: name == "lives", RETENTION_S) == ()
    assert cordons.forget(lambda name: name == "lives", RETENTION_S + 1) == ("gone",)
    assert "lives" in cordons
    assert "gone" not in cordons
    assert dict(cordons.last_alive()) == {"lives": RETENTION_S + 1}


def test_a_lifted_one_is_a_worker_like_any_other() -> None:
    cordons = Cordons()
    cordons.load({"a": 1.0})
    assert "a" in cordons
    cordons.lift("a")
    cordons.lift("a")
    assert "a" not in cordons


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CORDONS", 2)
    cordons = Cordons()
    cordons.add("a", 0.0)
    cordons.add("b", 0.0)
    cordons.add("a", 1.0)
    with pytest.raises(Overloaded):
        cordons.add("c", 0.0)
