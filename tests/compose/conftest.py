from __future__ import annotations

from pathlib import Path

import pytest

from compose.demo_model import ensure_demo_model


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint; not to be changed."""
    return ensure_demo_model(tmp_path_factory.mktemp("models"))
