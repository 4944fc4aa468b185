"""The planner's settings, read from the environment once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.planner.core.live.load import ASSUMED_TOKENS_PER_S
from services.planner.core.multicast.baselines import STRATEGIES, Strategy
from services.planner.core.multicast.traffic import BUSY_NIC_SHARE
from services.planner.live import LIVE_CHOICES, LIVE_POLICIES, LiveSettings
from shared.bus.access import NatsAccess
from shared.bus.nats_stream import StreamLimits
from shared.settings import Settings


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """See ``docs/configuration.md`` for every variable."""

    nats_url: str
    nats: NatsAccess
    lease_ttl_s: float
    load_floor_gbps: float
    strategy: Strategy
    knows_flows: bool
    busy_nic_share: float
    live: LiveSettings
    stream: StreamLimits
    health_port: int
    health_host: str
    log_level: str
    die_with_parent: bool
    ready_fd: int

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> PlannerConfig:
        """Raises ``SettingsError`` naming the variable and its value."""
        env = Settings(environ)
        return cls(
            nats_url=env.text("BLITZ_NATS_URL", default="nats://127.0.0.1:4222"),
            nats=NatsAccess.from_env(env),
            lease_ttl_s=env.number("BLITZ_PLANNER_LEASE_TTL_S", default=15.0, minimum=0.5),
            load_floor_gbps=env.number("BLITZ_PLANNER_LOAD_FLOOR_GBPS", default=0.1, minimum=0.0001),
            strategy=env.choice("BLITZ_PLANNER_STRATEGY", STRATEGIES, default="chain"),
            knows_flows=env.boolean("BLITZ_PLANNER_KNOWS_FLOWS", default=True),
            busy_nic_share=env.number("BLITZ_PLANNER_BUSY_NIC_SHARE", default=BUSY_NIC_SHARE, minimum=0.0, maximum=1.0),
            live=LiveSettings(
                choice=env.choice("BLITZ_PLANNER_LIVE", LIVE_CHOICES, default="auto"),
                policy=env.choice("BLITZ_PLANNER_LIVE_POLICY", LIVE_POLICIES, default="zigzag"),
                slo_ttft_s=env.number("BLITZ_PLANNER_SLO_TTFT_MS", default=1000.0, minimum=1.0) / 1000,
                slo_tbt_s=env.number("BLITZ_PLANNER_SLO_TBT_MS", default=100.0, minimum=1.0) / 1000,
                assumed_tokens_per_s=env.number(
                    "BLITZ_PLANNER_ASSUMED_TOKENS_PER_S", default=ASSUMED_TOKENS_PER_S, minimum=1.0
                ),
            ),
            stream=StreamLimits(
                max_bytes=env.integer("BLITZ_PLANNER_STREAM_MIB", default=64, minimum=1) << 20,
                max_age_s=env.number("BLITZ_PLANNER_STREAM_MAX_AGE_S", default=3600.0, minimum=60.0),
                num_replicas=env.integer("BLITZ_PLANNER_STREAM_REPLICAS", default=1, minimum=1, maximum=5),
            ),
            health_port=env.integer("BLITZ_HEALTH_PORT", default=0, minimum=0, maximum=65535),
            health_host=env.text("BLITZ_HEALTH_HOST", default="127.0.0.1"),
            log_level=env.log_level("BLITZ_LOG_LEVEL"),
            die_with_parent=env.boolean("BLITZ_DIE_WITH_PARENT", default=False),
            ready_fd=env.integer("BLITZ_READY_FD", default=0, minimum=0),
        )
