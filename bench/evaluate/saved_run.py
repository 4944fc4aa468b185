"""A finished run: the file of ``blitzscale replay --json`` with more keys, which ``blitzscale report`` reads too."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Literal

import msgspec

from bench.evaluate.machine import Conditions
from bench.evaluate.windows import Window
from bench.replay.document import Document, read_document
from bench.replay.observations import gpu_seconds_by_role
from bench.replay.record import Collector
from bench.traces.request import Trace
from shared.errors import BadRequest
from shared.messages.common import Role

FORMAT: Literal["blitzscale-evaluation.v2"] = "blitzscale-evaluation.v2"
_GAP_DIGITS = 5
"""Of a second: tens of microseconds."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides about a run. Two runs of one plan measure the same."""

    format: Literal["blitzscale-evaluation.v2"] = FORMAT
    purpose: Literal["tuning", "measured"]
    trace: str
    digest: str
    """Of arrivals and lengths."""
    spread_seconds: bool
    model: str
    slo_ttft_s: float | None
    slo_tbt_s: float | None
    workers: int
    nic_gbps: float
    system: str
    settings: dict[str, str]
    """Of the services, by which this system is what it is."""
    instances: dict[Role, int]
    """At the beginning; of a system that does not scale, always."""
    window: Window
    scale_rate: float
    seed: int
    repetition: int = 0

    @property
    def name(self) -> str:
        """Of its file."""
        split = "-".join(f"{number}{role[0]}" for role, number in sorted(self.instances.items(), reverse=True))
        where = f"{self.window.start_s:g}s-x{self.scale_rate:.4g}"
        return f"{self.purpose}-{where}-r{self.repetition}-{self.system}-{split}"

    @property
    def give_back_s(self) -> float:
        """For how long the services were told to keep an instance without need. Raises ``BadRequest``."""
        told = self.settings.get("BLITZ_MONITOR_DOWN_WINDOW_S", "nothing")
        try:
            told_s = float(told)
        except ValueError:
            told_s = math.nan
        if not 0 <= told_s < math.inf:
            raise BadRequest(f"{self.name} does not say in seconds how long instances are kept: {told}")
        return told_s


def digest(trace: Trace, window: Window, lead_in_s: float) -> str:
    """Of what is replayed: nobody can read arrivals from it."""
    begin_s = window.start_s - lead_in_s
    rows = [
        (r.arrival_s, r.input_tokens, r.output_tokens) for r in trace.requests if begin_s <= r.arrival_s < window.end_s
    ]
    return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()[:16]


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything was when a replay began; hosts by their numbers."""

    instances: dict[int, Role]
    copies: dict[int, bool]
    """In host memory, and whether the worker keeps it for itself (``HostCopy.cached``)."""


class SavedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run."""

    plan: Plan
    placed: Placed
    document: Document
    """Its reasons for being void are those of the replay and of the machine."""
    gaps_s: tuple[tuple[float, ...], ...]
    """Between tokens, in the order of the document's records."""
    conditions: Conditions
    attempts: int = 1
    """Of which this is the last: a void run is repeated once."""

    @classmethod
    def of(
        cls, plan: Plan, placed: Placed, document: Document, collector: Collector, conditions: Conditions
    ) -> SavedRun:
        """Add up."""
        gaps = {r.index: tuple(round(gap_s, _GAP_DIGITS) for gap_s in r.gaps_s) for r in collector.records}
        return cls(
            plan=plan,
            placed=placed,
            document=msgspec.structs.replace(document, void=document.void + conditions.void),
            gaps_s=tuple(gaps[row.index] for row in document.records),
            conditions=conditions,
        )

    @classmethod
    def read(cls, file: Path) -> SavedRun:
        """Raises ``BadRequest`` for a file that is no run."""
        try:
            own = msgspec.json.decode(file.read_bytes(), type=_Own)
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            raise BadRequest(f"{file} is no run of an evaluation ({error}): move it away", param="dir") from error
        document = msgspec.structs.replace(read_document(file), label=own.plan.system)
        return cls(document=document, **{name: getattr(own, name) for name in _Own.__struct_fields__})

    @property
    def mean_instances(self) -> float:
        """From the first arrival to the last, as in a simulation: what stays idle after it is of nobody's load.
        Raises ``BadRequest`` if the cluster was not observed."""
        cluster = self.document.cluster
        if cluster is None:
            raise BadRequest(f"{self.plan.name}: the cluster was not observed")
        last_s = max(row.due_s for row in self.document.records)
        if last_s <= cluster.begin_s:
            return cluster.gpu_seconds / (cluster.end_s - cluster.begin_s)
        held = gpu_seconds_by_role(cluster.instances, cluster.begin_s, last_s)
        return sum(held.values()) / (last_s - cluster.begin_s)


class _Own(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that a replay's file does not have."""

    plan: Plan
    placed: Placed
    gaps_s: tuple[tuple[float, ...], ...]
    conditions: Conditions
    attempts: int


class Runs:
    """The finished runs of a directory, a file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def file(self, plan: Plan) -> Path:
        """Where a run is kept."""
        return self._folder / f"{plan.name}.json"

    def find(self, plan: Plan) -> SavedRun | None:
        """The finished run of a plan. None: there is none, or one of other settings, which does not count any more.
        Raises ``BadRequest`` for a file that is no run."""
        file = self.file(plan)
        if not file.exists():
            return None
        found = SavedRun.read(file)
        return found if found.plan == plan else None

    def keep(self, run: SavedRun) -> None:
        """Whole or not at all. Raises ``OSError``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        own = _Own(
            plan=run.plan, placed=run.placed, gaps_s=run.gaps_s, conditions=run.conditions, attempts=run.attempts
        )
        file = self.file(run.plan)
        aside = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            aside.write_bytes(msgspec.json.encode(run.document.flat() | msgspec.structs.asdict(own)) + b"\n")
            aside.replace(file)
        finally:
            aside.unlink(missing_ok=True)
