from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.settings import Settings, SettingsError


@pytest.mark.parametrize(
    ("get", "expected"),
    [
        (lambda s: s.text("TEXT", "what"), "a b"),
        (lambda s: s.integer("INTEGER", "what", minimum=3, maximum=3), 3),
        (lambda s: s.number("NUMBER", "what"), 2.5),
        (lambda s: s.boolean("TRUE", "what"), True),
        (lambda s: s.boolean("FALSE", "what"), False),
        (lambda s: s.choice("CHOICE", "what", ("cpu", "cuda")), "cuda"),
        (lambda s: s.listing("LISTING", "what"), ("a", "b")),
        (lambda s: s.duration_s("MILLISECONDS", "what"), 0.25),
        (lambda s: s.duration_s("MINUTES", "what"), 90.0),
        (lambda s: s.duration_s("INTEGER", "what"), 3.0),
        (lambda s: s.integer("EMPTY", "what", default=7), 7),
        (lambda s: s.text("ABSENT", "what", default=""), ""),
        (lambda s: s.boolean("ABSENT", "what", default=False), False),
        (lambda s: s.duration_s("ABSENT", "what", default=0.5), 0.5),
    ],
)
def test_values_and_defaults(get: Callable[[Settings], Any], expected: object) -> None:
    environ = {
        "TEXT": " a b ", "INTEGER": "3", "NUMBER": "2.5", "TRUE": "Yes", "FALSE": "0", "CHOICE": "cuda",
        "LISTING": "a, b,,", "MILLISECONDS": "250ms", "MINUTES": "1.5m", "EMPTY": " ",
    }  # fmt: skip
    assert get(Settings(environ)) == expected


@pytest.mark.parametrize(
    ("value", "get"),
    [
        ("x", lambda s: s.integer("KEY", "what")),
        ("2.5", lambda s: s.integer("KEY", "what")),
        ("-1", lambda s: s.integer("KEY", "what", minimum=0)),
        ("70000", lambda s: s.integer("KEY", "what", maximum=65535)),
        ("nan", lambda s: s.number("KEY", "what")),
        ("inf", lambda s: s.number("KEY", "what")),
        ("0.1", lambda s: s.number("KEY", "what", minimum=0.2)),
        ("maybe", lambda s: s.boolean("KEY", "what")),
        ("tpu", lambda s: s.choice("KEY", "what", ("cpu", "cuda"))),
        ("5 days", lambda s: s.duration_s("KEY", "what")),
        ("-5s", lambda s: s.duration_s("KEY", "what")),
        ("1ms", lambda s: s.duration_s("KEY", "what", minimum=1.0)),
    ],
)
def test_a_bad_value_is_refused_by_key_and_value(value: str, get: Callable[[Settings], Any]) -> None:
    with pytest.raises(SettingsError) as caught:
        get(Settings({"KEY": value}))
    assert f"KEY={value!r}" in caught.value.message
    assert (caught.value.code, caught.value.param) == ("bad_settings", "KEY")


def test_a_required_value_that_is_absent_is_named() -> None:
    with pytest.raises(SettingsError, match="KEY is not set"):
        Settings({}).text("KEY", "what")


def test_a_secret_comes_from_its_file_of_which_no_more_is_read_than_a_secret_has(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hunter2\n")
    assert Settings({"KEY_FILE": str(file)}).secret("KEY", "") == "hunter2"
    with pytest.raises(SettingsError, match="KEY_FILE='/dev/zero': the file is larger than 65536 bytes"):
        Settings({"KEY_FILE": "/dev/zero"}).secret("KEY", "")


def test_of_an_endless_value_the_beginning_is_shown() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings({"KEY": "x" * 100_000}).integer("KEY", "")
    assert len(caught.value.message) < 300
