"""The planner's settings, read from the environment once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self, get_args

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
    plans: PlanSettings
    profiles: Path | None
    """A directory of profiles, or one."""
    stream: StreamLimits

    @classmethod
    def read(cls, env: Settings) -> Self:
        """Raises ``SettingsError``."""
        return cls(
            **process_settings(env),
            **health_settings(env),
            plans=PlanSettings(
                lease_ttl_s=env.number(
                    "BLITZ_PLANNER_LEASE_TTL_S",
                    "Time that a leased worker may take to accept its plan.",
                    default=15.0,
                    minimum=0.5,
                ),
                load_floor_gbps=env.number(
                    "BLITZ_PLANNER_LOAD_FLOOR_GBPS",
                    "The planner gives up a target that receives more slowly than this on average.",
                    default=0.1,
                    minimum=0.0001,
                ),
                strategy=env.choice(
                    "BLITZ_PLANNER_STRATEGY",
                    "How weights reach new instances. `chain`: multicast, each forwards to the next. For comparison: "
                    "`star` (each from a complete copy), `disk` (each from the checkpoint), `host-cache` (each from a "
                    "copy on its host, or from the checkpoint, leaving a copy there).",
                    STRATEGIES,
                    default="chain",
                ),
                knows_flows=env.boolean(
                    "BLITZ_PLANNER_KNOWS_FLOWS",
                    "Plans avoid NICs that send or receive. `false`, for comparison: as if all were idle.",
                    default=True,
                ),
                busy_nic_share=env.number(
                    "BLITZ_PLANNER_BUSY_NIC_SHARE",
                    "Share of a NIC's bandwidth, per direction, above which traffic of others counts as a flow to "
                    "avoid.",
                    default=BUSY_NIC_SHARE,
                    minimum=0.0,
                    maximum=1.0,
                ),
                advise=env.boolean(
                    "BLITZ_PLANNER_ADVISE",
                    "Of every model, only show and record what the load asks for. Minimums, and what is asked for by "
                    "hand, are carried out.",
                    default=False,
                ),
                mutation=env.boolean(
                    "BLITZ_PLANNER_MUTATION",
                    "Instances get other roles of their model where one lacks instances. `false`: drain and load.",
                    default=True,
                ),
                migration=env.boolean(
                    "BLITZ_PLANNER_MIGRATION",
                    "Running requests move to other instances when theirs goes, or when a prompt beside them lacks KV. "
                    "`false`: they end where they are.",
                    default=True,
                ),
                live=LiveSettings(
                    choice=env.choice(
                        "BLITZ_PLANNER_LIVE",
                        "Instances compute for overloaded ones while they load, where the request does not say. "
                        "`auto`: where loading first would miss the TTFT objective.",
                        LIVE_CHOICES,
                        default="auto",
                    ),
                    policy=env.choice(
                        "BLITZ_PLANNER_LIVE_POLICY",
                        "How the two share the queue. For comparison: `best_effort`, `overlap` (the new instance runs "
                        "layers of whole requests as they arrive and shares none), `stop_the_world`.",
                        LIVE_POLICIES,
                        default="zigzag",
                    ),
                    slo_ttft_s=env.number(
                        "BLITZ_PLANNER_SLO_TTFT_MS",
                        "TTFT objective of models without one of their own.",
                        default=1000.0,
                        minimum=1.0,
                    )
                    / 1000,
                    slo_tbt_s=env.number(
                        "BLITZ_PLANNER_SLO_TBT_MS",
                        "The same for TBT: how long a pair may keep decode steps waiting.",
                        default=100.0,
                        minimum=1.0,
                    )
                    / 1000,
                    assumed_tokens_per_s=env.number(
                        "BLITZ_PLANNER_ASSUMED_TOKENS_PER_S",
                        "Prompt tokens per second of one instance of a model without a profile, until one reports a "
                        "measurement.",
                        default=ASSUMED_TOKENS_PER_S,
                        minimum=1.0,
                    ),
                ),
            ),
            profiles=profiles_path(env),
            stream=StreamLimits(
                max_bytes=env.integer(
                    "BLITZ_PLANNER_STREAM_MIB",
                    "Size of the plan stream; NATS drops the oldest plans.",
                    default=64,
                    minimum=1,
                )
                << 20,
                max_age_s=env.number(
                    "BLITZ_PLANNER_STREAM_MAX_AGE_S", "Time that a plan stays in it.", default=3600.0, minimum=60.0
                ),
                num_replicas=env.integer(
                    "BLITZ_PLANNER_STREAM_REPLICAS",
                    "Servers of a NATS cluster that keep this stream and that of the records. The planner applies the "
                    "three settings of the stream at every start, also to one that exists.",
                    default=1,
                    minimum=1,
                    maximum=5,
                ),
            ),
        )
