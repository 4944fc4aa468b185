"""How plans are made."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.planner.core.live.load import ASSUMED_TOKENS_PER_S, REPORT_TTL_S
from services.planner.core.multicast.baselines import Strategy
from services.planner.core.multicast.traffic import BUSY_NIC_SHARE
from shared.messages.common import LiveChoice, LivePolicy


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """Defaults where neither the request nor the model says anything."""

    choice: LiveChoice = "auto"
    policy: LivePolicy = "zigzag"
    slo_ttft_s: float = 1.0
    slo_tbt_s: float = 0.1
    assumed_tokens_per_s: float = ASSUMED_TOKENS_PER_S
    """Prefill speed of an instance of a model without a profile, until one reports it."""
    report_ttl_s: float = REPORT_TTL_S
    """Load reports older than this are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """How plans are made."""

    lease_ttl_s: float = 15.0
    """How long a leased worker may take to accept its plan."""
    load_floor_gbps: float = 0.1
    """A target slower than this on average is given up."""
    strategy: Strategy = "chain"
    knows_flows: bool = True
    """Avoid NICs in use. Without it a plan is made as if no NIC carried anything: what flow-aware planning is compared
    with."""
    busy_nic_share: float = BUSY_NIC_SHARE
    """NICs in use are those that carry more than this share of their bandwidth."""
    mutation: bool = True
    """Whether instances get other roles of their model. Without it a role that lacks instances has them loaded: what
    mutation is compared with."""
    migration: bool = True
    """Requests of instances that go move to others. Without it they end where they are: what migration is compared
    with."""
    live: LiveSettings = field(default_factory=LiveSettings)
    advise: bool = False
    """Only say of every model what the load asks for."""
