"""What happens to a control plane, and in between is undone."""

from __future__ import annotations

import gc
import random

from bench.decisions.plane import OTHER, OURS, ControlPlane
from bench.decisions.population import Population
from bench.decisions.stopwatch import Stopwatch
from services.planner.core.operations.operation import Operation
from shared.messages.progress import ScaleProgress

SAMPLED = 200
"""Workers whose reports are measured in a repetition, at most; the others report all the same."""
REPORT_S = 0.1
LONG_S = 10.0
"""Until what was undone is over."""
TENTH = 10
BURST = 4
"""Requests of each model that wait at each gateway, and at each instance."""


class States:
    """Each method is one state; ``everything`` has all of them."""

    def __init__(self, num_gpus: int, models: int, seed: int) -> None:
        self.stopwatch = Stopwatch()
        self._rng = random.Random(seed)
        self._there = Population(num_gpus, models, seed)
        self._plane = ControlPlane(self._there, self.stopwatch)
        self._models = {model.name: model for model in self._there.models}
        self.num_wishes = 0
        """Demands of the monitor, so far."""
        for _ in range(2):
            for worker_id in self._there.instances:
                instance = self._there.workers[worker_id].instance
                assert instance is not None
                self._plane.request(instance.model)
        self._all_report()

    def counts(self) -> dict[str, int]:
        """Instances by model."""
        return self._there.counts()

    @property
    def num_leased(self) -> int:
        """Workers that are promised to a plan."""
        return self._plane.num_leased

    def everything(self, repetitions: int) -> None:
        """So many times each."""
        for state in (self.quiet, self.one_more, self.a_tenth, self.a_death, self.a_burst):
            # What stands is nobody's garbage: without this, collections walk the whole cluster.
            gc.collect()
            gc.freeze()
            for _ in range(repetitions):
                state()
                self.stopwatch.state = ""
                self._plane.passes(LONG_S)
                self._all_report()
            gc.unfreeze()

    # --- states ------------------------------------------------------------------------------

    def quiet(self) -> None:
        """Heartbeats and load reports come, requests come and go, and nothing is to do."""
        plane, there, watch = self._plane, self._there, self.stopwatch
        serving = there.instances
        sampled = frozenset(self._rng.sample(serving, min(SAMPLED, len(serving))))
        plane.passes(REPORT_S)
        for worker_id in serving:
            watch.state = "quiet" if worker_id in sampled else ""
            report = there.load(worker_id, plane.now_s)
            plane.load(report)
            if worker_id in sampled:
                plane.request(report.model)
        watch.state = "quiet"
        for worker_id in self._rng.sample(list(there.workers), min(SAMPLED, len(there.workers))):
            worker = there.workers[worker_id]
            plane.heartbeat(worker.heartbeat(), "heartbeat")
            there.new_traffic(worker_id)
            plane.heartbeat(worker.heartbeat(), "heartbeat with a change")
            plane.placement_reads()
        plane.queues(there.queues(OTHER, plane.now_s))
        plane.pool_ticks()
        plane.placement_looks()
        plane.gateway_ticks()
        plane.planner_ticks()
        plane.snapshot()
        self.num_wishes += plane.evaluate()
        name, count = self._rng.choice(list(there.counts().items()))
        plane.demand(name, count, count + 1)  # one of them has just gone
        plane.round()

    def one_more(self) -> None:
        """A model asks for one more instance, and gets it."""
        name = self._rng.choice(list(self._models))
        self.stopwatch.state = "one more"
        (operation,) = self._ask({name: 1})
        self._serve(operation)
        self._plane.snapshot()
        self._plane.planner_ticks()
        self._undo([operation])

    def a_tenth(self) -> None:
        """The largest model asks for a tenth of the cluster."""
        self.stopwatch.state = "a tenth"
        name = next(iter(self._models))
        operations = self._ask({name: len(self._there.workers) // TENTH})
        self._plane.planner_ticks()
        self._undo(operations)

    def a_death(self) -> None:
        """A worker with an instance of the largest model is gone, and its model asks for another."""
        plane, there = self._plane, self._there
        name = next(iter(self._models))
        held = {i: there.workers[i].instance for i in there.instances}
        dies = self._rng.choice([i for i, instance in held.items() if instance is not None and instance.model == name])
        count = there.counts()[name]
        self.stopwatch.state = "a death"
        plane.dies(dies)
        plane.placement_reads()
        plane.placement_looks()
        plane.routes_change()
        plane.request(name)
        plane.snapshot()
        self.num_wishes += plane.evaluate()
        plane.tries_again()
        plane.planner_ticks()
        plane.demand(name, count, count - 1)
        operations = plane.round()
        self._undo(operations)
        instance, copies = held[dies], there.workers[dies].copies
        there.restart(dies)
        there.workers[dies].instance, there.workers[dies].copies = instance, copies
        self._report(dies)

    def a_burst(self) -> None:
        """Requests of all models wait at once, and all models ask for half of what is spare."""
        plane, there = self._plane, self._there
        spare = len(there.workers) - len(there.instances)
        each = max(1, spare // 2 // len(self._models))
        self._all_report(BURST)
        self.stopwatch.state = "a burst"
        self.num_wishes += plane.evaluate()
        operations = self._ask(dict.fromkeys(list(self._models)[: spare // each], each))
        plane.planner_ticks()
        self._undo(operations)

    # --- what they share ---------------------------------------------------------------------

    def _all_report(self, queued: int = 0) -> None:
        self.stopwatch.state = ""
        for worker_id in self._there.instances:
            self._plane.load(self._there.load(worker_id, self._plane.now_s, queued=queued))
        for gateway_id in (OURS, OTHER):
            self._plane.queues(self._there.queues(gateway_id, self._plane.now_s, queued=queued))
        # Whoever comes next would pay for all these reports: between two real requests there are only a few.
        for name in self._models:
            self._plane.request(name)

    def _ask(self, more: dict[str, int]) -> list[Operation]:
        counts = self._there.counts()
        for name, number in more.items():
            self._plane.demand(name, counts[name] + number, counts[name])
        operations = self._plane.round()
        got = sum(len(operation.open_targets) for operation in operations)
        if got != sum(more.values()):
            raise RuntimeError(f"{sum(more.values())} instances were asked for, and {got} planned")
        return operations

    def _serve(self, operation: Operation) -> None:
        plane, there, model = self._plane, self._there, self._models[operation.model]
        for worker_id, instance_id in operation.open_targets:
            for loads in (True, False):
                there.begin(worker_id, instance_id, model, epoch=1 << 40, plan_id=operation.plan_id, loads=loads)
                self._report(worker_id)
            event = ScaleProgress(
                plan_id=operation.plan_id,
                worker_id=worker_id,
                instance_id=instance_id,
                event="serving",
                after_s=0.0,
            )
            plane.progress(event)

    def _report(self, worker_id: str) -> None:
        self._plane.heartbeat(self._there.workers[worker_id].heartbeat(), "heartbeat with a change")
        self._plane.placement_reads()
        self._plane.routes_change()

    def _undo(self, operations: list[Operation]) -> None:
        self.stopwatch.state = ""
        self._plane.undo(operations)
        for worker_id, worker in self._there.workers.items():
            if worker.instance is not None and worker.instance.plan_id:
                self._there.end(worker_id)
                self._report(worker_id)
        self._plane.snapshot()
