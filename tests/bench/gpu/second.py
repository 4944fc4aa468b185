"""Second processes for tests."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection


def raises(pipe: Connection) -> None:
    pipe.send(ValueError("no"))


def dies(pipe: Connection) -> None:
    del pipe
    os._exit(3)
