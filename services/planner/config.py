"""The planner's settings, read from the environment once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from services.planner.core.live.load import ASSUMED_TOKENS_PER_S
from services.planner.core.multicast.baselines import STRATEGIES
from services.planner.core.multicast.traffic import BUSY_NIC_SHARE
from services.planner.core.rounds.settings import LiveSettings, PlanSettings
from shared.bus.nats_stream import StreamLimits
from shared.messages.common import LiveChoice, LivePolicy
from shared.service import ServiceConfig, health_settings, process_settings, profiles_path
from shared.settings import Settings

LIVE_CHOICES: tuple[LiveChoice, ...] = get_args(LiveChoice)
LIVE_POLICIES: tuple[LivePolicy, ...] = get_args(LivePolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig(ServiceConfig):
    """See ``docs/configuration.md`` for every variable."""

    plans: PlanSettings
    profiles: Path | None
    """A directory of profiles, or one."""
    stream: StreamLimits

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> PlannerConfig:
        """Raises ``SettingsError`` naming the variable and its value."""
        env = Settings(environ)
        return cls(
            **process_settings(env),
            **health_settings(env),
            plans=PlanSettings(
                lease_ttl_s=env.number("BLITZ_PLANNER_LEASE_TTL_S", default=15.0, minimum=0.5),
                load_floor_gbps=env.number("BLITZ_PLANNER_LOAD_FLOOR_GBPS", default=0.1, minimum=0.0001),
                strategy=env.choice("BLITZ_PLANNER_STRATEGY", STRATEGIES, default="chain"),
                knows_flows=env.boolean("BLITZ_PLANNER_KNOWS_FLOWS", default=True),
                busy_nic_share=env.number(
                    "BLITZ_PLANNER_BUSY_NIC_SHARE", default=BUSY_NIC_SHARE, minimum=0.0, maximum=1.0
                ),
                advise=env.boolean("BLITZ_PLANNER_ADVISE", default=False),
                mutation=env.boolean("BLITZ_PLANNER_MUTATION", default=True),
                migration=env.boolean("BLITZ_PLANNER_MIGRATION", default=True),
                live=LiveSettings(
                    choice=env.choice("BLITZ_PLANNER_LIVE", LIVE_CHOICES, default="auto"),
                    policy=env.choice("BLITZ_PLANNER_LIVE_POLICY", LIVE_POLICIES, default="zigzag"),
                    slo_ttft_s=env.number("BLITZ_PLANNER_SLO_TTFT_MS", default=1000.0, minimum=1.0) / 1000,
                    slo_tbt_s=env.number("BLITZ_PLANNER_SLO_TBT_MS", default=100.0, minimum=1.0) / 1000,
                    assumed_tokens_per_s=env.number(
                        "BLITZ_PLANNER_ASSUMED_TOKENS_PER_S", default=ASSUMED_TOKENS_PER_S, minimum=1.0
                    ),
                ),
            ),
            profiles=profiles_path(env),
            stream=StreamLimits(
                max_bytes=env.integer("BLITZ_PLANNER_STREAM_MIB", default=64, minimum=1) << 20,
                max_age_s=env.number("BLITZ_PLANNER_STREAM_MAX_AGE_S", default=3600.0, minimum=60.0),
                num_replicas=env.integer("BLITZ_PLANNER_STREAM_REPLICAS", default=1, minimum=1, maximum=5),
            ),
        )
