"""Settings of all services, read before any of them starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from compose.child import ChildSpec
from compose.errors import StackRefused
from compose.settings_check import check_settings

NAMES = ("pool", "planner-0", "planner-1", "monitor", "gateway", "worker-0")


def specs(**variables: str) -> tuple[ChildSpec, ...]:
    return tuple(ChildSpec(name, ("/bin/true",), variables) for name in NAMES)


def test_what_every_service_takes_is_taken() -> None:
    variables = {"BLITZ_WORKER_KV_MIB": "64", "BLITZ_MONITOR_SLACK_S": "1", "BLITZ_ADMIN_KEY": "a", "PATH": "/bin"}
    assert check_settings(specs(**variables)) == ()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("BLITZ_WORKER_KV_MIB", "abc", "worker-0: BLITZ_WORKER_KV_MIB='abc': must be a whole number"),
        ("BLITZ_LEASE_S", "-1", "pool: BLITZ_LEASE_S='-1': must be at least"),
        ("BLITZ_LOG_LEVEL", "loud", "pool: BLITZ_LOG_LEVEL='loud': must be debug, info"),
        ("BLITZ_GATEWAY_STALL_S", "soon", "gateway: BLITZ_GATEWAY_STALL_S='soon': must be a duration"),
        ("BLITZ_GATEWAY_KEYS_FILE", "/nonexistent", "gateway: BLITZ_GATEWAY_KEYS_FILE='/nonexistent': cannot be read"),
        ("BLITZ_ADMIN_KEYS_FILE", "/nonexistent", "gateway: BLITZ_ADMIN_KEYS_FILE='/nonexistent': cannot be read"),
    ],
)
def test_a_bad_setting_is_named_with_its_service(variable: str, value: str, said: str) -> None:
    with pytest.raises(StackRefused, match=said):
        check_settings(specs(**{variable: value}))


def test_a_bad_keys_file_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nname = "a"\nkey = "hidden"\nrequest_per_minute = 4\n')
    with pytest.raises(StackRefused, match="unknown field `request_per_minute`") as caught:
        check_settings(specs(BLITZ_GATEWAY_KEYS_FILE=str(file)))
    assert "hidden" not in str(caught.value)


def test_a_misspelt_variable_is_named_once_with_what_was_meant() -> None:
    told = check_settings(specs(BLITZ_WORKER_KV_MB="64", BLITZ_COLOUR="red", BLITZ_UNUSED=""))
    assert told == (
        "no service reads BLITZ_COLOUR, which is set",
        "no service reads BLITZ_WORKER_KV_MB, which is set: did you mean BLITZ_WORKER_KV_MIB?",
    )
