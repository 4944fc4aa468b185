"""The services' settings, read before any of them starts: a mistake is reported once, and nothing is left
behind."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping

from compose.child import ChildSpec
from compose.children import kind_of
from compose.config import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, URL_VARIABLE
from compose.errors import StackRefused
from shared.settings import SettingsError

_OURS = frozenset({ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, URL_VARIABLE})
"""Read by the command, not by a service."""
_OF_COMPOSE = frozenset(
    f"BLITZ_{name}" for name in ("MODELS", "CREDENTIALS", "WORKERS", "BIND", "PORT", "SHM_SIZE", "GPU")
)
"""Only docker-compose reads these; a user of both may have them set."""
_PREFIX = "BLITZ_"


class _Noting(Mapping[str, str]):
    """An environment that records which of its variables were read."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> str:
        self.asked.add(key)
        return self._environ[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._environ)

    def __len__(self) -> int:
        return len(self._environ)


def check_settings(specs: Iterable[ChildSpec]) -> tuple[str, ...]:
    """Read the settings of each of these services as it will. A line for each variable of the environment that looks
    like a setting and is none.

    Raises ``StackRefused`` with service, variable and value.
    """
    readers = _readers()
    known: set[str] = set(_OURS | _OF_COMPOSE)
    set_variables: set[str] = set()
    for spec in specs:
        environ = _Noting(spec.env)
        try:
            readers[kind_of(spec.name)](environ)
        except SettingsError as error:
            raise StackRefused(f"{spec.name}: {error.message}") from error
        known |= environ.asked
        set_variables |= {name for name, value in spec.env.items() if name.startswith(_PREFIX) and value}
    return tuple(_unknown(name, known) for name in sorted(set_variables - known))


def _unknown(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    meant = f": did you mean {near[0]}?" if near else ""
    return f"no service reads {name}, which is set{meant}"


def _readers() -> Mapping[str, Callable[[Mapping[str, str]], object]]:
    # Here: other commands need none of it, and it takes a while to import.
    from services.gateway.config import GatewayConfig
    from services.gateway.key_file import read_keys
    from services.monitor.config import MonitorConfig
    from services.planner.config import PlannerConfig
    from services.pool.config import PoolConfig
    from services.worker.config import WorkerConfig

    def gateway(environ: Mapping[str, str]) -> None:
        config = GatewayConfig.from_env(environ)
        if config.keys_file:
            read_keys(config.keys_file)

    return {
        "gateway": gateway,
        "monitor": MonitorConfig.from_env,
        "planner": PlannerConfig.from_env,
        "pool": PoolConfig.from_env,
        "worker": WorkerConfig.from_env,
    }
