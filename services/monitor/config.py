"""The monitor's settings, read from the environment once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.monitor.core.demand import DemandPolicy
from shared.bus.access import NatsAccess
from shared.settings import Settings


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """See ``docs/configuration.md`` for every variable."""

    nats_url: str
    nats: NatsAccess
    policy: DemandPolicy
    interval_s: float
    repeat_s: float
    health_port: int
    health_host: str
    log_level: str
    die_with_parent: bool
    ready_fd: int

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> MonitorConfig:
        """Raises ``SettingsError`` naming the variable and its value."""
        env = Settings(environ)
        usual = DemandPolicy()
        policy = DemandPolicy(
            rate_window_s=env.number("BLITZ_MONITOR_RATE_WINDOW_S", default=usual.rate_window_s, minimum=0.1),
            down_window_s=env.number("BLITZ_MONITOR_DOWN_WINDOW_S", default=usual.down_window_s, minimum=0.1),
            slack_s=env.number("BLITZ_MONITOR_SLACK_S", default=usual.slack_s, minimum=0.01),
            prefill_tokens_per_s=env.number("BLITZ_MONITOR_PREFILL_TOKENS_PER_S", default=0.0, minimum=0.0),
            assumed_tokens_per_s=env.number(
                "BLITZ_MONITOR_ASSUMED_TOKENS_PER_S", default=usual.assumed_tokens_per_s, minimum=1.0
            ),
            utilisation=env.number("BLITZ_MONITOR_UTILISATION", default=usual.utilisation, minimum=0.05, maximum=1.0),
            kv_upper_bound=env.number(
                "BLITZ_MONITOR_KV_UPPER_BOUND", default=usual.kv_upper_bound, minimum=0.05, maximum=1.0
            ),
            running_limit=env.integer("BLITZ_MONITOR_RUNNING_LIMIT", default=0, minimum=0),
        )
        return cls(
            nats_url=env.text("BLITZ_NATS_URL", default="nats://127.0.0.1:4222"),
            nats=NatsAccess.from_env(env),
            policy=policy,
            interval_s=env.number("BLITZ_MONITOR_INTERVAL_S", default=0.1, minimum=0.01),
            repeat_s=env.number("BLITZ_MONITOR_REPEAT_S", default=1.0, minimum=0.05),
            health_port=env.integer("BLITZ_HEALTH_PORT", default=0, minimum=0, maximum=65535),
            health_host=env.text("BLITZ_HEALTH_HOST", default="127.0.0.1"),
            log_level=env.log_level("BLITZ_LOG_LEVEL"),
            die_with_parent=env.boolean("BLITZ_DIE_WITH_PARENT", default=False),
            ready_fd=env.integer("BLITZ_READY_FD", default=0, minimum=0),
        )
