"""The services' settings, read before any of them starts: a mistake is reported once, and nothing is left
behind."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping

from compose.child import ChildSpec
from compose.children import kind_of
from compose.errors import StackRefused
from compose.variables import OF_COMMANDS, OF_CONTAINERS
from shared.settings import Settings, SettingsError

_PREFIX = "BLITZ_"


def check_settings(specs: Iterable[ChildSpec]) -> tuple[str, ...]:
    """Read the settings of each of these services as it will. A line for each variable of the environment that looks
    like a setting and is none.

    Raises ``StackRefused`` with service, variable and value.
    """
    readers = readers_by_service()
    known = {setting.key for setting in OF_COMMANDS + OF_CONTAINERS}
    set_variables: set[str] = set()
    for spec in specs:
        settings = Settings(spec.env)
        try:
            readers[kind_of(spec.name)](settings)
        except SettingsError as error:
            raise StackRefused(f"{spec.name}: {error.message}") from error
        known |= settings.asked.keys()
        set_variables |= {name for name, value in spec.env.items() if name.startswith(_PREFIX) and value}
    return tuple(_unknown(name, known) for name in sorted(set_variables - known))


def _unknown(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    meant = f": did you mean {near[0]}?" if near else ""
    return f"no service reads {name}, which is set{meant}"


def readers_by_service() -> Mapping[str, Callable[[Settings], object]]:
    """What reads the settings of each kind of service. Raises ``SettingsError``."""
    # Here: other commands need none of it, and it takes a while to import.
    from services.gateway.admin_keys import read_admin_keys
    from services.gateway.config import GatewayConfig
    from services.gateway.key_file import read_keys
    from services.monitor.config import MonitorConfig
    from services.planner.config import PlannerConfig
    from services.pool.config import PoolConfig
    from services.worker.config import WorkerConfig

    def gateway(settings: Settings) -> None:
        config = GatewayConfig.read(settings)
        if config.keys_file:
            read_keys(config.keys_file)
        if config.admin_keys_file:
            read_admin_keys(config.admin_keys_file)

    return {
        "gateway": gateway,
        "monitor": MonitorConfig.read,
        "planner": PlannerConfig.read,
        "pool": PoolConfig.read,
        "worker": WorkerConfig.read,
    }
