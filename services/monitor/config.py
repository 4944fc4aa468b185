"""The monitor's settings, read from the environment once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.monitor.core.policy import DemandPolicy
from shared.service import ServiceConfig, health_settings, process_settings, profiles_path
from shared.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig(ServiceConfig):
    policy: DemandPolicy
    profiles: Path | None
    interval_s: float
    repeat_s: float

    @classmethod
    def read(cls, env: Settings) -> Self:
        """Raises ``SettingsError``."""
        usual = DemandPolicy()
        policy = DemandPolicy(
            rate_window_s=env.number(
                "BLITZ_MONITOR_RATE_WINDOW_S",
                "Time over which arrivals are averaged.",
                default=usual.rate_window_s,
                minimum=0.1,
            ),
            down_window_s=env.number(
                "BLITZ_MONITOR_DOWN_WINDOW_S",
                "For so long the load must fit fewer instances, and the monitor be connected, before one is drained. "
                "Models that lack an instance take one sooner. 0: an idle instance goes after twice the time that it "
                "took to load (0.5 to 60 s), one under load after two rate windows.",
                default=usual.down_window_s,
                minimum=0.0,
            ),
            slack_s=env.number(
                "BLITZ_MONITOR_SLACK_S",
                "Time within which waiting prompts should be computed, for models without a TTFT objective.",
                default=usual.slack_s,
                minimum=0.01,
            ),
            prefill_tokens_per_s=env.number(
                "BLITZ_MONITOR_PREFILL_TOKENS_PER_S",
                "Prompt tokens per second of one instance of a model without a profile. 0: what instances measure.",
                default=0.0,
                minimum=0.0,
            ),
            assumed_tokens_per_s=env.number(
                "BLITZ_MONITOR_ASSUMED_TOKENS_PER_S",
                "The same, until an instance has reported a measurement.",
                default=usual.assumed_tokens_per_s,
                minimum=1.0,
            ),
            utilisation=env.number(
                "BLITZ_MONITOR_UTILISATION",
                "Share of that rate that the monitor plans with; of decode instances, of the requests that one decodes "
                "within the TBT objective.",
                default=usual.utilisation,
                minimum=0.05,
                maximum=1.0,
            ),
            kv_upper_bound=env.number(
                "BLITZ_MONITOR_KV_UPPER_BOUND",
                "Share of an instance's KV blocks that may be in use.",
                default=usual.kv_upper_bound,
                minimum=0.05,
                maximum=1.0,
            ),
            running_limit=env.integer(
                "BLITZ_MONITOR_RUNNING_LIMIT",
                "Running requests that one instance should have at most. 0: only KV and the TBT objective count.",
                default=0,
                minimum=0,
            ),
            prescale=env.boolean(
                "BLITZ_MONITOR_PRESCALE",
                "A marked rise of what prefill instances need raises the number of decode instances at once.",
                default=usual.prescale,
            ),
        )
        return cls(
            **process_settings(env),
            **health_settings(env),
            policy=policy,
            profiles=profiles_path(env),
            interval_s=env.number("BLITZ_MONITOR_INTERVAL_S", "Time between two verdicts.", default=0.1, minimum=0.01),
            repeat_s=env.number(
                "BLITZ_MONITOR_REPEAT_S",
                "Time after which the monitor repeats an unmet verdict.",
                default=1.0,
                minimum=0.05,
            ),
        )
