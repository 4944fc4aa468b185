from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import page_cache

NUM_BYTES = (1 << 20) + 5


@pytest.fixture
def file() -> Iterator[Path]:
    """On a disk, which the folder for temporary files need not be."""
    with tempfile.NamedTemporaryFile(dir=Path(__file__).parent, prefix=".page-cache-") as made:
        made.write(b"x" * NUM_BYTES)
        made.flush()
        yield Path(made.name)


def test_a_file_leaves_the_page_cache_and_comes_back(file: Path) -> None:
    kind = subprocess.run(("stat", "-f", "-c", "%T", file), capture_output=True, text=True, check=True).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        pytest.skip(f"{kind} has no other place than the page cache")
    assert page_cache.drop([file]) == "posix_fadvise"
    assert page_cache.resident_bytes(file) == 0
    page_cache.warm([file])
    assert page_cache.resident_bytes(file) == NUM_BYTES


def test_pages_that_stay_are_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "resident_bytes", lambda _: NUM_BYTES)
    with pytest.raises(page_cache.CacheStays, match=str(NUM_BYTES)):
        page_cache.drop([file])


def test_an_empty_file_has_no_pages(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert page_cache.resident_bytes(tmp_path / "empty") == 0
