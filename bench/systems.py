"""The systems that an evaluation compares: the same services, with other settings.

What a system is differs in how weights reach a new instance, in whether that one works before it has all of them, in
which host copies there are, and in whether instances are scaled at all. Everything else (when to scale and by how much,
pre-scaling, when an instance is given back, how requests are routed) is the same code with the same defaults, as in the
paper (section 6.1: "the same scaling policy for both BlitzScale and variants of S-LLM"). ``docs/baselines.md`` says
what was taken from where, and where a system differs from its authors'.

The services take the settings from their environment (``System.environ``); a simulation, which calls the services'
cores, from the fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from services.monitor.core.give_back import idle_window_s
from services.monitor.core.policy import DemandPolicy
from services.planner.core.multicast.baselines import Strategy
from services.pool.core.copies_policy import KEEP_COPIES_S, CopiesPolicy
from shared.errors import BadRequest
from shared.messages.common import LiveChoice, LivePolicy, Role

Size = Literal["by-load", "full", "half"]
"""How many instances: as the load asks for; all that the workers can hold; ``blitz``'s average number."""
NEVER = "never"
"""How the environment says that a copy does not go for not being used."""
GIVE_BACK_S = DemandPolicy().down_window_s
"""For how long systems keep an instance that the load does not need, unless another time is asked for."""


class UnknownSystem(BadRequest):
    """No system has this name."""

    code = "unknown_system"


class NotInServices(BadRequest):
    """The services have no such system: it is simulated only."""

    code = "not_in_services"


class Split(NamedTuple):
    """Instances by role."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One of the systems. Settings are the values of the cores that take them."""

    name: str
    about: str
    """What it is, in a line."""
    source: str
    """Whose it is, and where it is described."""
    strategy: Strategy = "chain"
    live: LiveChoice = "never"
    live_policy: LivePolicy = "zigzag"
    """Of pairs, where ``live`` makes some."""
    mutation: bool = False
    copies: CopiesPolicy = "one"
    keep_copies_s: float = KEEP_COPIES_S
    """For how long a copy that a load left on a host stays unused; infinite: for good."""
    size: Size = "by-load"
    serving: Literal["colocated", "disaggregated"] = "disaggregated"
    pipelines: bool = False
    """Weights come in blocks, and new instances run the model together while it loads (``bench.sim.lambdascale``)."""
    simulated_only: bool = False

    @property
    def scales(self) -> bool:
        """Whether its number of instances follows the load."""
        return self.size == "by-load"

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of its instances."""
        return ("colocated",) if self.serving == "colocated" else ("prefill", "decode")

    @property
    def least_instances(self) -> int:
        """Of all roles together: one of each. Those that scale begin with them."""
        return len(self.roles)

    def num_instances(self, most: int, mean: float = math.nan) -> int:
        """How many instances of all roles it always has; for one that scales, how many at most.

        ``most``: as the workers can hold. ``mean``: ``blitz``'s (or ``blitz-colocated``'s) average over the same
        requests, rounded to the nearest, halves up; only those that are half take it.
        Raises ``BadRequest`` for fewer workers than roles, and where the mean is missing.
        """
        if most < self.least_instances:
            raise BadRequest(f"{self.name} needs {self.least_instances} instances, and the workers can hold {most}")
        if self.size != "half":
            return most
        if not 0 <= mean < math.inf:
            raise BadRequest(f"{self.name} has as many instances as another on average, and that is {mean}")
        return min(most, max(self.least_instances, math.floor(mean + 0.5)))

    def splits(self, num_instances: int) -> tuple[Split, ...]:
        """The ways to split so many instances into prefill and decode: what a search for the best goes through.

        Of colocated ones there is none.
        """
        if self.serving == "colocated":
            return ()
        return tuple([Split(n, num_instances - n) for n in range(1, num_instances)])

    def keeping(self, keep_copies_s: float) -> System:
        """The same with another time to keep copies, which its name says: ``sllm-60s``, ``sllm-never`` (to expire).

        Raises ``BadRequest`` where no copies are kept, or for a negative time.
        """
        if self.copies != "kept":
            raise BadRequest(f"{self.name} keeps no copies for a time")
        if not keep_copies_s >= 0:
            raise BadRequest(f"copies cannot be kept for {keep_copies_s} s")
        until = NEVER if keep_copies_s == math.inf else f"{keep_copies_s:g}s"
        return replace(self, name=f"{self.name.partition('-')[0]}-{until}", keep_copies_s=keep_copies_s)

    def environ(self, *, give_back_s: float = GIVE_BACK_S) -> Mapping[str, str]:
        """What all services of a stack get: each reads its own. Whatever a system may differ in is named, so nothing
        is left to what the environment says otherwise. ``give_back_s``: as the function of that name says; 0: twice
        what the system's own loads take.

        A system that does not scale is one whose planner only advises: its instances are those that were asked for by
        hand (``POST /admin/models/{model}/scale`` with a ``hold_s`` that outlasts the run, by role), and are replaced
        when they die. Raises ``NotInServices``.
        """
        if self.simulated_only:
            raise NotInServices(f"{self.name} is simulated only: the services have no such strategy")
        return {
            "BLITZ_PLANNER_STRATEGY": self.strategy,
            "BLITZ_PLANNER_LIVE": self.live,
            "BLITZ_PLANNER_LIVE_POLICY": self.live_policy,
            "BLITZ_PLANNER_MUTATION": _flag(on=self.mutation),
            "BLITZ_PLANNER_ADVISE": _flag(on=not self.scales),
            "BLITZ_MONITOR_DOWN_WINDOW_S": f"{give_back_s:g}",
            "BLITZ_POOL_COPIES": self.copies,
            "BLITZ_POOL_KEEP_COPIES_S": NEVER if self.keep_copies_s == math.inf else f"{self.keep_copies_s:g}",
        }


def _flag(*, on: bool) -> str:
    return "1" if on else "0"


_BLITZ = "BlitzScale, OSDI'25"
_SLLM = "ServerlessLLM, OSDI'24, as section 6.1 of the BlitzScale paper has it"
_DISTSERVE = "DistServe, OSDI'24, as section 6.2 of the BlitzScale paper has it"
_VLLM = "vLLM, SOSP'23, as section 6.4 of the BlitzScale paper has it"

_ALL = (
    System(
        name="blitz",
        about="chains between instances, live scaling, instances that change roles, one host copy in the cluster",
        source=_BLITZ,
        live="auto",
        mutation=True,
    ),
    System(
        name="blitz-nolive",
        about="blitz's chains; a new instance works once it has all weights",
        source=f"{_BLITZ}, section 6.3: +Multicast",
    ),
    System(
        name="blitz-star",
        about="weights over the network, from complete copies to each new instance on its own; no live scaling",
        source=f"{_BLITZ}, section 6.3: +Network",
        strategy="star",
    ),
    System(
        name="sllm",
        about="a copy left on the own host, kept for a while; the disk where there is none; hosts with a copy first",
        source=_SLLM,
        strategy="host-cache",
        copies="kept",
    ),
    System(
        name="allcache",
        about="sllm with a copy of every model on every host, always",
        source=f"{_SLLM}: the optimal version",
        strategy="host-cache",
        copies="every-host",
    ),
    System(
        name="overlap",
        about="blitz's chains; a new instance runs whole batches by itself, layer by layer as they arrive",
        source="pipelined loading as in PipeSwitch, OSDI'20",
        live="auto",
        live_policy="overlap",
    ),
    System(
        name="static-full",
        about="no scaling: an instance on every worker, in the best split of prefill and decode",
        source=f"{_DISTSERVE}: full",
        size="full",
    ),
    System(
        name="static-half",
        about="no scaling: as many instances as blitz has on average, in the best split of prefill and decode",
        source=f"{_DISTSERVE}: half",
        size="half",
    ),
    System(
        name="blitz-colocated",
        about="blitz with prefill and decode in the same instances",
        source=f"{_BLITZ}, section 6.4",
        live="auto",
        mutation=True,
        serving="colocated",
    ),
    System(
        name="static-colocated-full",
        about="no scaling, prefill and decode in the same instances: one on every worker",
        source=f"{_VLLM}: over-provisioned",
        size="full",
        serving="colocated",
    ),
    System(
        name="static-colocated-half",
        about="no scaling, prefill and decode in the same instances: as many as blitz-colocated has on average",
        source=f"{_VLLM}: average provisioning",
        size="half",
        serving="colocated",
    ),
    System(
        name="lambdascale",
        about="λPipe: a binomial multicast of blocks; the receivers run the model together while it loads",
        source="λScale, arXiv 2502.09922",
        strategy="host-cache",
        copies="kept",
        pipelines=True,
        simulated_only=True,
    ),
)

SYSTEMS: Mapping[str, System] = MappingProxyType({system.name: system for system in _ALL})
"""By name."""
ABLATION = ("sllm", "blitz-star", "blitz-nolive", "blitz")
"""What each of the paper's techniques adds, in the order of its Figure 20."""


def give_back_s(asked_s: float, network_load_s: float) -> float:
    """For how long every system that scales keeps an instance that the load does not need; ``asked_s`` 0: by the rule.

    The monitor's own rule goes by how long a load takes, and would keep instances the longer the slower a system loads
    them. Systems are compared with one window: what the rule says of a load over an idle network link, ``blitz``'s.
    """
    return asked_s or idle_window_s(network_load_s)


def check_give_back(asked_s: float) -> None:
    """Raises ``BadRequest`` for what is no time to keep an instance."""
    if not 0 <= asked_s < math.inf:
        raise BadRequest(f"--give-back is a time in seconds, 0 or more, not {asked_s!r}", param="give-back")


def named(names: str, *, ablation: bool = False) -> tuple[System, ...]:
    """The systems of a list with commas, and those of the ablation if that is wanted: each once, in the order given.

    Raises ``BadRequest`` for a list without a name, and for two names of one system, as sllm and sllm-300s are.
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if not asked:
        raise BadRequest(f"name a system: {', '.join(SYSTEMS)}", param="systems")
    found = tuple(dict.fromkeys(map(find, (*asked, *(ABLATION if ablation else ())))))
    known: dict[System, str] = {}
    for system in found:
        other = known.setdefault(replace(system, name=""), system.name)
        if other != system.name:
            raise BadRequest(f"{other} and {system.name} are the same system: name one of them", param="systems")
    return found


def find(name: str) -> System:
    """The system of that name; also one with another time to keep copies, as ``keeping`` names them.

    Raises ``UnknownSystem``, naming those that there are.
    """
    if name in SYSTEMS:
        return SYSTEMS[name]
    base, _, kept = name.partition("-")
    seconds = math.inf if kept == NEVER else _seconds(kept)
    if base in SYSTEMS and SYSTEMS[base].copies == "kept" and seconds is not None:
        return SYSTEMS[base].keeping(seconds)
    raise UnknownSystem(f"there is no system {name!r}: {', '.join(SYSTEMS)} (sllm also as sllm-60s or sllm-{NEVER})")


def _seconds(text: str) -> float | None:
    """Of ``60s``; None for what is no time."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)s", text)
    return float(match[1]) if match is not None else None
