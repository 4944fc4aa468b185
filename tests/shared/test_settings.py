from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shared.settings import Settings, SettingsError


@pytest.mark.parametrize(
    ("get", "expected"),
    [
        (lambda s: s.text("TEXT"), "a b"),
        (lambda s: s.integer("INTEGER", minimum=3, maximum=3), 3),
        (lambda s: s.number("NUMBER"), 2.5),
        (lambda s: s.boolean("TRUE"), True),
        (lambda s: s.boolean("FALSE"), False),
        (lambda s: s.choice("CHOICE", ("cpu", "cuda")), "cuda"),
        (lambda s: s.listing("LISTING"), ("a", "b")),
        (lambda s: s.duration_s("MILLISECONDS"), 0.25),
        (lambda s: s.duration_s("MINUTES"), 90.0),
        (lambda s: s.duration_s("INTEGER"), 3.0),
        (lambda s: s.integer("EMPTY", default=7), 7),
        (lambda s: s.text("ABSENT", default=""), ""),
        (lambda s: s.boolean("ABSENT", default=False), False),
        (lambda s: s.duration_s("ABSENT", default=0.5), 0.5),
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
        ("x", lambda s: s.integer("KEY")),
        ("2.5", lambda s: s.integer("KEY")),
        ("-1", lambda s: s.integer("KEY", minimum=0)),
        ("70000", lambda s: s.integer("KEY", maximum=65535)),
        ("nan", lambda s: s.number("KEY")),
        ("inf", lambda s: s.number("KEY")),
        ("0.1", lambda s: s.number("KEY", minimum=0.2)),
        ("maybe", lambda s: s.boolean("KEY")),
        ("tpu", lambda s: s.choice("KEY", ("cpu", "cuda"))),
        ("5 days", lambda s: s.duration_s("KEY")),
        ("-5s", lambda s: s.duration_s("KEY")),
        ("1ms", lambda s: s.duration_s("KEY", minimum=1.0)),
    ],
)
def test_a_bad_value_is_refused_by_key_and_value(value: str, get: Callable[[Settings], Any]) -> None:
    with pytest.raises(SettingsError) as caught:
        get(Settings({"KEY": value}))
    assert f"KEY={value!r}" in caught.value.message
    assert (caught.value.code, caught.value.param) == ("bad_settings", "KEY")


def test_a_required_value_that_is_absent_is_named() -> None:
    with pytest.raises(SettingsError, match="KEY is not set"):
        Settings({}).text("KEY")
