from __future__ import annotations

import pytest

from bench.prefix.systems import SYSTEMS, chosen, ordered
from services.gateway.config import GatewayConfig
from shared.errors import BadRequest
from shared.settings import Settings


def config(system: str) -> GatewayConfig:
    return GatewayConfig.read(Settings(SYSTEMS[system]))


def test_each_system_is_what_its_name_says_to_a_gateway() -> None:
    assert (config("none").prefix_cache, config("none").affinity_choices) == (False, 0)
    assert (config("cache").prefix_cache, config("cache").affinity_choices) == (True, 0)
    assert (config("hash").prefix_cache, config("hash").affinity_choices) == (True, 1)
    assert config("hash").affinity_imbalance > 1e6
    default = GatewayConfig.read(Settings({}))
    affinity = config("affinity")
    assert affinity.prefix_cache
    assert (affinity.affinity_choices, affinity.affinity_imbalance) == (
        default.affinity_choices,
        default.affinity_imbalance,
    )


def test_what_is_compared_with_is_always_there() -> None:
    assert chosen("affinity,cache") == ("none", "cache", "affinity")
    assert chosen("none") == ("none",)
    for names in ("", "other", "cache,other"):
        with pytest.raises(BadRequest, match="systems must be") as refused:
            chosen(names)
        assert refused.value.param == "system"


def test_they_come_there_and_back() -> None:
    assert ordered(("none", "cache"), 0) == ("none", "cache")
    assert ordered(("none", "cache"), 1) == ("cache", "none")
