"""What all services share around their own work; ``tests/services/gateway/test_process.py`` runs one as a process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from shared.process import ProcessState
from shared.service import Connection, ServiceConfig, health_settings, process_settings, run
from shared.settings import Settings, SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig(ServiceConfig):
    what: str

    @classmethod
    def read(cls, env: Settings) -> DemoConfig:
        return cls(**process_settings(env), **health_settings(env), what=env.text("BLITZ_DEMO", "what"))


class FakeBus:
    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True


async def nothing(config: DemoConfig, process: ProcessState) -> None:
    raise AssertionError("it must not be run")


def test_settings_that_cannot_be_read_are_one_line_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BLITZ_DEMO", raising=False)
    assert run("demo", DemoConfig.from_env, nothing) == 1
    assert capsys.readouterr().err == "demo: BLITZ_DEMO is not set and has no default\n"


def test_every_service_reads_the_same_variables_for_its_process() -> None:
    environ = {
        "BLITZ_DEMO": "x", "BLITZ_NATS_URL": "nats://n:1", "BLITZ_LOG_LEVEL": "debug", "BLITZ_LOG_FORMAT": "json",
        "BLITZ_DIE_WITH_PARENT": "1",
        "BLITZ_READY_FD": "5", "BLITZ_HEALTH_PORT": "9", "BLITZ_HEALTH_HOST": "::",
    }  # fmt: skip
    config = DemoConfig.from_env(environ)
    assert (config.nats_url, config.log_level, config.die_with_parent, config.ready_fd) == (
        "nats://n:1",
        "debug",
        True,
        5,
    )
    assert (config.health_port, config.health_host, config.what, config.log_format) == (9, "::", "x", "json")
    with pytest.raises(SettingsError, match="BLITZ_HEALTH_PORT"):
        DemoConfig.from_env(environ | {"BLITZ_HEALTH_PORT": "70000"})


async def test_all_parts_close_at_once_and_one_that_hangs_is_told() -> None:
    bus, told = FakeBus(), []
    both = asyncio.Barrier(2)
    connection = Connection(bus)
    connection.close_with("one", both.wait, if_stuck=lambda: told.append("one"))
    connection.close_with("two", both.wait, if_stuck=lambda: told.append("two"))
    connection.close_with("hangs", asyncio.Event().wait, if_stuck=lambda: told.append("hangs"))
    await connection.close()
    assert (bus.closed, told) == (True, ["hangs"])
