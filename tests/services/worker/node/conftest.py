from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.worker.node.fake_machine import FakeMachine


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)
