"""What the playback of the queue's rules says of a burst: the figures that measured ones are held against."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bench.lab.errors import LabFailed
from bench.live.workload import Workload
from bench.stats import percentile
from shared.messages.live import ZigzagAssignment
from shared.messages.operations import ScaleRecord
from shared.zigzag.playback import Job, Played, play
from shared.zigzag.queue import Policy


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """When the target has what, in seconds since the burst."""

    layers_s: tuple[float, ...]
    """Per decoder layer."""
    loaded_s: float
    """Everything: embedding, final norm and head, too."""

    @property
    def for_playback(self) -> tuple[float, ...]:
        """Per layer, in order; the last one once everything is loaded.

        The playback knows layers only, and there the target finishes batches itself from the last one on. Really it
        can run the last layer a little earlier, but finish nothing before it has the head.
        """
        times_s = [*self.layers_s[:-1], max(self.layers_s[-1], self.loaded_s)]
        return tuple(itertools.accumulate(times_s, max))

    @classmethod
    def of_assignment(cls, assignment: ZigzagAssignment, planned_s: float) -> LoadTimes | None:
        """As the planner expected ``planned_s`` after the burst; None when the assignment does not tell."""
        if not assignment.layers_ready_s:
            return None
        layers_s = tuple(planned_s + ready_s for ready_s in assignment.layers_ready_s)
        return cls(layers_s, planned_s + assignment.loaded_s if assignment.loaded_s else layers_s[-1])

    @classmethod
    def of_record(cls, record: ScaleRecord, burst_at_s: float, *, num_layers: int) -> LoadTimes:
        """As it was. Raises ``LabFailed`` when the record is not of one target with all layers."""
        if len(record.targets) != 1:
            raise LabFailed(f"{record.plan_id} was to load one target and has {len(record.targets)}")
        (target,) = record.targets
        if len(target.layer_ready_ms) != num_layers or target.loaded_ms is None:
            raise LabFailed(
                f"{record.plan_id} tells of {len(target.layer_ready_ms)} layers ready at {target.worker_id}, not of "
                f"{num_layers}"
            )
        offset_s = record.triggered_at_s - burst_at_s
        return cls(
            tuple(offset_s + ready_ms / 1000 for ready_ms in target.layer_ready_ms), offset_s + target.loaded_ms / 1000
        )

    @classmethod
    def of_rate(cls, unit_bytes: Sequence[int], bytes_per_s: float, *, num_layers: int) -> LoadTimes:
        """Units (layers first) one after another over a link, from the burst on."""
        ends_s = [sent / bytes_per_s for sent in itertools.accumulate(unit_bytes)]
        return cls(tuple(ends_s[:num_layers]), ends_s[-1])


@dataclass(frozen=True, slots=True)
class Prediction:
    """First tokens of a burst by playback: seconds since the burst, in the order of the prompts."""

    completions_s: tuple[float, ...]
    layers_per_s: float
    """Of both sides while at least ``waiting`` batches were without a first token."""

    @property
    def mean_s(self) -> float:
        return sum(self.completions_s) / len(self.completions_s)

    @property
    def p99_s(self) -> float:
        return percentile(sorted(self.completions_s), 99)

    @property
    def worst_s(self) -> float:
        return max(self.completions_s)


def busy_until_s(completions_s: Sequence[float], waiting: int) -> float:
    """Until when at least ``waiting`` of the batches are without a first token; 0: there are not so many."""
    ordered = sorted(completions_s)
    return ordered[len(ordered) - waiting] if 0 < waiting <= len(ordered) else 0.0


def predict(workload: Workload, policy: Policy | None, times: LoadTimes, *, waiting: int) -> Prediction:
    """Play the burst. ``policy`` None: the first instance works alone."""
    jobs = [Job(f"prompt-{index:03}", workload.layer_s) for index in range(workload.num_prompts)]
    if policy is None:
        # A target that never has its first layer runs nothing.
        never_s = 2 * workload.alone_s
        played = play(jobs, [never_s] * workload.num_layers, Policy.STOP_THE_WORLD)
    else:
        played = play(jobs, times.for_playback, policy)
    return Prediction(played.completions, _layers_per_s(played, busy_until_s(played.completions, waiting)))


def _layers_per_s(played: Played, until_s: float) -> float:
    if until_s <= 0:
        return 0.0
    run = 0.0
    for each in played.runs:
        for _, _, _, start_s, end_s in each.layers():
            run += max(0.0, min(end_s, until_s) - start_s) / (end_s - start_s)
    return run / until_s
