from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from services.gateway import key_file
from services.gateway.core.key_limits import Limits
from services.gateway.key_file import digest, read_keys
from shared.settings import SettingsError

TOML = """
[[keys]]
name = "team-a"
key = "sk-secret"
requests_per_minute = 60
tokens_per_minute = 10_000
max_concurrent_requests = 4
models = ["demo"]

[[keys]]
name = "free"
sha256 = "{hash}"
"""


def write(folder: Path, text: str, name: str = "keys.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_keys_are_given_as_they_are_or_as_their_hashes(tmp_path: Path) -> None:
    hashed = hashlib.sha256(b"sk-other").hexdigest()
    keys = read_keys(write(tmp_path, TOML.format(hash=hashed)))
    limited = keys[digest(b"sk-secret")]
    assert (limited.name, limited.limits) == ("team-a", Limits(60, 10_000, 4))
    assert limited.models == {"demo"}
    assert keys[digest(b"sk-other")].limits == Limits()
    assert keys[digest(b"sk-other")].models is None


def test_a_file_whose_name_says_so_is_json(tmp_path: Path) -> None:
    text = json.dumps({"keys": [{"name": "a", "key": "k", "requests_per_minute": 1}]})
    assert [key.name for key in read_keys(write(tmp_path, text, "keys.json")).values()] == ["a"]


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([{"name": "a"}], "needs one of key and sha256"),
        ([{"name": "a", "key": "k", "sha256": "0" * 64}], "needs one of key and sha256"),
        ([{"name": "a", "key": "k"}, {"name": "a", "key": "l"}], "two keys are called 'a'"),
        ([{"name": "a", "key": "k"}, {"name": "b", "key": "k"}], "'a' and 'b' are the same key"),
        ([{"name": "a b", "key": "k"}], "name"),
        ([{"name": "a", "key": "k", "requests_per_minute": 0}], "requests_per_minute"),
        ([{"name": "a", "key": "k", "rpm": 5}], "rpm"),
        ([{"name": "a", "key": ""}], "key"),
        ([{"name": "a", "sha256": "secret"}], "sha256"),
        ({}, "keys"),
    ],
)
def test_a_wrong_file_is_refused_and_the_message_shows_no_key(tmp_path: Path, entries: object, problem: str) -> None:
    path = write(tmp_path, json.dumps({"keys": entries}).replace('"k"', '"sk-secret"'), "keys.json")
    with pytest.raises(SettingsError, match=problem) as caught:
        read_keys(path)
    assert path in caught.value.message
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("text", ["keys = [", "\x00", "[[keys]]\nname = 'a'\nkey = 'sk-secret' oops"])
def test_what_is_no_toml_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="BLITZ_GATEWAY_KEYS_FILE") as caught:
        read_keys(write(tmp_path, text))
    assert "secret" not in caught.value.message


def test_a_missing_or_huge_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        read_keys(str(tmp_path / "none.toml"))
    monkeypatch.setattr(key_file, "MAX_FILE_BYTES", 10)
    with pytest.raises(SettingsError, match="more than 10 bytes"):
        read_keys(write(tmp_path, TOML))
