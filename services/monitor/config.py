"""The monitor's settings, read from the environment once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.monitor.core.policy import DemandPolicy
from shared.service import ServiceConfig, health_settings, process_settings, profiles_path
from shared.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig(ServiceConfig):
    """See ``docs/configuration.md`` for every variable."""

    policy: DemandPolicy
    profiles: Path | None
    interval_s: float
    repeat_s: float

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> MonitorConfig:
        """Raises ``SettingsError`` naming the variable and its value."""
        env = Settings(environ)
        usual = DemandPolicy()
        policy = DemandPolicy(
            rate_window_s=env.number("BLITZ_MONITOR_RATE_WINDOW_S", default=usual.rate_window_s, minimum=0.1),
            down_window_s=env.number("BLITZ_MONITOR_DOWN_WINDOW_S", default=usual.down_window_s, minimum=0.0),
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
            prescale=env.boolean("BLITZ_MONITOR_PRESCALE", default=usual.prescale),
        )
        return cls(
            **process_settings(env),
            **health_settings(env),
            policy=policy,
            profiles=profiles_path(env),
            interval_s=env.number("BLITZ_MONITOR_INTERVAL_S", default=0.1, minimum=0.01),
            repeat_s=env.number("BLITZ_MONITOR_REPEAT_S", default=1.0, minimum=0.05),
        )
