from __future__ import annotations

from pathlib import Path

import pytest

from shared.last_good import LastGood
from shared.settings import read_secret


def test_what_cannot_be_read_is_as_before_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "password"
    password = LastGood(lambda: read_secret("KEY_FILE", file), "first")
    assert [password.now(), password.now()] == ["first", "first"]
    file.write_text("second\n")
    assert password.now() == "second"
    file.write_bytes(b"sec\xff")
    assert [password.now(), password.now()] == ["second", "second"]
    file.write_text("")
    assert password.now() == "second"
    file.write_text("third")
    assert password.now() == "third"
    file.unlink()
    assert password.now() == "third"
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"KEY_FILE={str(file)!r}: {problem}; what was read before stays in use"
        for problem in (
            "cannot be read: No such file or directory", "cannot be read: it is not text", "the file is empty",
            "cannot be read: No such file or directory",
        )
    ]  # fmt: skip
