from __future__ import annotations

from pathlib import Path

import pytest

from shared.bus.access import ANYBODY, NatsAccess
from shared.settings import Settings, SettingsError

USER = {"BLITZ_NATS_USER": "pool"}


def read(**environ: str) -> NatsAccess:
    return NatsAccess.from_env(Settings({f"BLITZ_NATS_{name}": value for name, value in environ.items()}))


def test_nothing_set_is_anybody() -> None:
    assert read() == read(USER="", PASSWORD="", PASSWORD_FILE=" ") == ANYBODY
    assert ANYBODY.tls() is None


def test_a_password_comes_from_the_variable_or_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("from the file\n")
    assert read(USER="pool", PASSWORD="plain") == NatsAccess("pool", "plain")
    found = read(USER="pool", PASSWORD_FILE=str(file))
    assert found == NatsAccess("pool", "from the file", password_file=file)
    assert found.in_files
    assert not read(USER="pool", PASSWORD="plain").in_files


def test_so_does_a_user(tmp_path: Path) -> None:
    file = tmp_path / "user"
    file.write_text("pool-2\n")
    assert read(USER_FILE=str(file), PASSWORD="plain") == NatsAccess("pool-2", "plain", user_file=file)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"USER": "pool"}, "BLITZ_NATS_PASSWORD or BLITZ_NATS_PASSWORD_FILE is not set"),
        ({"PASSWORD": "x"}, "BLITZ_NATS_USER is not set"),
        ({"USER": "pool", "USER_FILE": "{text}", "PASSWORD": "x"}, "BLITZ_NATS_USER_FILE are both set"),
        ({"USER_FILE": "{empty}", "PASSWORD": "x"}, "BLITZ_NATS_USER_FILE='.*': the file is empty"),
        ({"USER": "pool", "PASSWORD": "x", "PASSWORD_FILE": "/y"}, "BLITZ_NATS_PASSWORD_FILE are both set"),
        (
            {"USER": "pool", "PASSWORD_FILE": "/not/there"},
            "BLITZ_NATS_PASSWORD_FILE='/not/there': cannot be read: No such",
        ),
        ({"USER": "pool", "PASSWORD_FILE": "{empty}"}, "the file is empty"),
        ({"USER": "pool", "PASSWORD_FILE": "{binary}"}, "it is not text"),
        ({"USER": "pool", "PASSWORD": "x", "CREDS_FILE": "{text}"}, "BLITZ_NATS_CREDS_FILE are both set"),
        ({"CREDS_FILE": "/not/there"}, "BLITZ_NATS_CREDS_FILE='/not/there': there is no such file"),
        ({"CREDS_FILE": "{text}"}, "BLITZ_NATS_CREDS_FILE='.*': holds no whole NATS USER JWT"),
        ({"CERT_FILE": "{text}"}, "BLITZ_NATS_KEY_FILE is not set"),
        ({"KEY_FILE": "{text}"}, "BLITZ_NATS_CERT_FILE is not set"),
        ({"CA_FILE": "{text}"}, "BLITZ_NATS_CA_FILE='.*': cannot be used"),
        ({"CERT_FILE": "{text}", "KEY_FILE": "{text}"}, "BLITZ_NATS_CERT_FILE='.*': cannot be used"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, environ: dict[str, str], says: str) -> None:
    for name, content in {"empty": b"\n", "binary": b"\xff\xfe", "text": b"words"}.items():
        (tmp_path / name).write_bytes(content)
    places = {name: str(tmp_path / name) for name in ("empty", "binary", "text")}
    with pytest.raises(SettingsError, match=says):
        read(**{name: value.format(**places) for name, value in environ.items()})


def test_a_password_is_in_no_text_about_it() -> None:
    assert "secret" not in repr(read(USER="pool", PASSWORD="secret"))
    with pytest.raises(SettingsError) as caught:
        read(PASSWORD="secret")
    assert "secret" not in caught.value.message
