"""What Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Sequence

from compose.config import DEFAULT_PORT

FIRST_HEALTH_PORT = 9091
"""As in ``BLITZ_HEALTH_PORT=9091 blitzscale up``."""
HEALTH_PORT = 9090
"""Of containers."""
JOB = "blitzscale"

PROMETHEUS = f"""\
global:
  scrape_interval: 5s
  evaluation_interval: 15s
rule_files: [alerts.yml]
scrape_configs:
  - job_name: {JOB}
    file_sd_configs:
      - files: [targets.yml]
"""

TARGETS_OF_UP = f"""\
# Of BLITZ_HEALTH_PORT={FIRST_HEALTH_PORT} blitzscale up --workers 2: gateway, pool, planner, monitor and workers, in
# this order. Prometheus reads this file again when it changes.
"""
TARGETS_OF_COMPOSE = """\
# Of docker-compose.yml with two workers; workers' ports follow that of their container.
"""


def targets_of_up() -> str:
    """``targets.yml``."""
    health = range(FIRST_HEALTH_PORT, FIRST_HEALTH_PORT + 5)
    return TARGETS_OF_UP + _targets([f"127.0.0.1:{port}" for port in (DEFAULT_PORT, *health)])


def targets_of_compose() -> str:
    """``targets.compose.yml``."""
    services = [f"{name}:{HEALTH_PORT}" for name in ("pool", "planner", "monitor", "worker")]
    workers = [f"worker:{HEALTH_PORT + number}" for number in (1, 2)]
    return TARGETS_OF_COMPOSE + _targets([f"gateway:{DEFAULT_PORT}", *services, *workers])


def _targets(addresses: Sequence[str]) -> str:
    return "- targets:\n" + "".join(f'    - "{address}"\n' for address in addresses)
