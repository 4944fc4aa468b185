"""What is seen of a run where single steps and loads matter; runs of whole traces are not watched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.sim.fabric import Fabric, LinkKind
from bench.sim.requests import Served
from bench.sim.sharing import Resource
from shared.messages.operations import ScaleRecord
from shared.messages.plans import ScalePlan


class Step(NamedTuple):
    """Prompt tokens that an instance computed; tokens in one layer count as that layer's share."""

    worker_id: str
    began_s: float
    ended_s: float
    num_tokens: float


@dataclass(slots=True)
class Watch:
    """Of one run; times are the clock's."""

    steps: list[Step] = field(default_factory=list)
    plans: list[ScalePlan] = field(default_factory=list)
    """Of loads, as they were published."""
    zero_s: float = 0.0
    """That requests' due times, and what is imposed, count from. This and the next ones are there at the end."""
    served: tuple[Served, ...] = ()
    records: tuple[ScaleRecord, ...] = ()
    weights_bytes: Counter[LinkKind] = field(default_factory=Counter)
    """Of weights, by the kind of link that they left through."""

    def ran(self, worker_id: str, began_s: float, ended_s: float, num_tokens: float) -> None:
        """A step has ended."""
        if num_tokens:
            self.steps.append(Step(worker_id, began_s, ended_s, num_tokens))

    def ended(
        self,
        zero_s: float,
        served: Iterable[Served],
        records: Iterable[ScaleRecord],
        carried: Mapping[tuple[str, Resource], int],
        fabric: Fabric,
    ) -> None:
        """The run is over. ``carried``: bytes by purpose and first link."""
        self.zero_s, self.served, self.records = zero_s, tuple(served), tuple(records)
        for (purpose, first), num_bytes in carried.items():
            kind = fabric.kind_of(first)
            if purpose == "weights" and kind is not None:
                self.weights_bytes[kind] += num_bytes
