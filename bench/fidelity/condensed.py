"""What is kept of runs in the lab, to compare a simulation with: no arrivals and no lengths, which are the trace's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

import msgspec
from msgspec.structs import asdict

from bench.evaluate.machine import Conditions
from bench.evaluate.saved_run import Placed, Plan, SavedRun
from bench.replay.observations import InstancePoint, Operation
from shared.errors import BadRequest
from shared.messages.common import Role

FORMAT: Literal["blitzscale-fidelity.v1"] = "blitzscale-fidelity.v1"
_TTFT_DIGITS, _DIGITS = 3, 4
"""Of a second: milliseconds, and tenths of them for what is shorter, or told by the services."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A scale operation."""

    at_s: float
    """From the beginning of the window."""
    direction: str
    role: Role
    desired: int
    took_s: float | None
    """From the trigger until its instances served; None for those that made none, or did not end."""

    @classmethod
    def of(cls, operation: Operation, *, zero_s: float = 0.0) -> Event:
        """``zero_s``: when the window began, in the operation's time."""
        took_ms = operation.trigger_to_serving_ms
        return cls(
            at_s=round(operation.at_s - zero_s, _DIGITS),
            direction=operation.direction,
            role=operation.role,
            desired=operation.desired,
            took_s=None if took_ms is None else round(took_ms / 1000, _DIGITS),
        )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run, be it of the lab or a simulated one."""

    ttft_s: tuple[float | None, ...]
    """By request, in the order of arrival; None: it failed."""
    mean_gap_s: tuple[float | None, ...]
    """The same; None: it failed, or had one token."""
    tbt_mean_s: float | None
    tbt_p99_s: float | None
    """Over all gaps between tokens."""
    gpu_seconds: float
    failed: int
    events: tuple[Event, ...]

    @property
    def scale_out_s(self) -> tuple[float, ...]:
        """Of each operation that made instances."""
        return tuple(e.took_s for e in self.events if e.direction == "out" and e.took_s is not None)


class Condensed(msgspec.Struct, frozen=True, kw_only=True):
    """One run in the lab."""

    plan: Plan
    placed: Placed
    conditions: Conditions
    void: tuple[str, ...]
    """Why it does not count; empty if it does."""
    held: dict[Role, int] = {}
    """Instances by role when the replay began, with those that still loaded: what had been asked for during the
    lead-in. Files of before have none."""
    figures: Figures

    @classmethod
    def of(cls, run: SavedRun) -> Condensed:
        """Raises ``BadRequest`` if the cluster was not observed."""
        document, cluster = run.document, run.document.cluster
        if cluster is None:
            raise BadRequest(f"{run.plan.name}: the cluster was not observed")
        rows = sorted(document.records, key=lambda row: row.index)
        tbt = document.result.tbt_s
        return cls(
            plan=run.plan,
            placed=run.placed,
            conditions=Conditions(**{name: round(value, _DIGITS) for name, value in asdict(run.conditions).items()}),
            void=document.void,
            held=_held(cluster.instances),
            figures=Figures(
                ttft_s=tuple(None if row.failure else _rounded(row.ttft_s, _TTFT_DIGITS) for row in rows),
                mean_gap_s=tuple(None if row.failure else _rounded(row.mean_gap_s, _DIGITS) for row in rows),
                tbt_mean_s=None if tbt is None else round(tbt.mean, _DIGITS + 1),
                tbt_p99_s=None if tbt is None else round(tbt.p99, _DIGITS + 1),
                gpu_seconds=round(cluster.gpu_seconds, 2),
                failed=document.result.failed + document.result.unfinished,
                events=tuple(Event.of(operation) for operation in cluster.operations),
            ),
        )


class File(msgspec.Struct, frozen=True, kw_only=True):
    """As it is kept."""

    format: Literal["blitzscale-fidelity.v1"] = FORMAT
    runs: tuple[Condensed, ...]

    def write(self, path: Path) -> None:
        """A line for each run. Raises ``OSError``."""
        lines = b",\n".join(map(msgspec.json.encode, self.runs))
        path.write_bytes(b'{"format":"%s","runs":[\n%s\n]}\n' % (self.format.encode(), lines))


def read(path: Path) -> tuple[Condensed, ...]:
    """A file, or the finished runs of an evaluation's directory; those that were measured, not those of a search.

    Raises ``BadRequest`` for what is neither, and where there is none.
    """
    runs = _read_folder(path) if path.is_dir() else _read_file(path)
    if not runs:
        raise BadRequest(f"{path} has no finished run", param="runs")
    for run in runs:
        last = run.plan.workers - 1
        if others := [n for n in (*run.placed.instances, *run.placed.copies) if not 0 <= n <= last]:
            raise BadRequest(f"{path}: {run.plan.name} has workers 0 to {last}, and not {others[0]}", param="runs")
    return runs


def _read_folder(folder: Path) -> tuple[Condensed, ...]:
    saved = (SavedRun.read(file) for file in sorted(folder.glob("*.json")))
    return tuple(Condensed.of(run) for run in saved if run.plan.purpose == "measured")


def _read_file(file: Path) -> tuple[Condensed, ...]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=File).runs
    except OSError as error:
        raise BadRequest(f"{file} cannot be read: {error.strerror}", param="runs") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"{file} has no runs to compare with: {error}", param="runs") from error


def _held(points: Sequence[InstancePoint]) -> dict[Role, int]:
    """``points``: from the beginning of a replay on."""
    held: Counter[Role] = Counter()
    for key, number in points[0].instances.items() if points else ():
        role, _, state = key.partition("/")
        if state != "draining":
            held[cast("Role", role)] += number
    return dict(held)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
