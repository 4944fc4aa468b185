"""Files with secrets in them."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, text: str, mode: int) -> None:
    """Replace a file as a whole: whoever reads sees the old text or the new one, also if this process is killed.

    Never readable by more than ``mode`` says, not for a moment; whoever holds the old one open keeps it.
    """
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
    beside.replace(path)
