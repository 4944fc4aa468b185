"""What no client should send costs little to refuse, or to take."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.services.gateway.request_bodies.bombs import BOMBS

MAX_CPU_S = 2 * 0.1
MAX_GROWN_BYTES = 2 * 64 * 2**20


@pytest.fixture(scope="module")
def costs() -> dict[str, Any]:
    program = [sys.executable, "-m", "tests.services.gateway.request_bodies.bombs"]
    output = subprocess.run(program, capture_output=True, check=True, text=True, timeout=110).stdout
    return {cost["name"]: cost for cost in map(json.loads, output.splitlines())}


@pytest.mark.parametrize("name", BOMBS)
def test_reading_it_takes_little_time_and_memory(costs: dict[str, Any], name: str) -> None:
    assert name in costs, "it took more than 10 s"
    assert costs[name]["cpu_s"] < MAX_CPU_S
    assert costs[name]["grown_bytes"] < MAX_GROWN_BYTES
