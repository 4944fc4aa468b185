"""Follows the scale operations under way: from what workers report, from the registry, and by deadlines."""

from __future__ import annotations

from services.planner.core.multicast.overhead import Overheads
from services.planner.core.operations.operation import STARTED_ANEW, Operation
from services.planner.core.operations.operations import Operations
from services.planner.core.operations.refusals import WorkerRefusals
from services.planner.core.rounds.moment import Moment
from services.planner.core.rounds.mutations import Mutations
from shared.messages.live import LiveReport
from shared.messages.progress import ScaleProgress
from shared.registry_view import RegistryView

BLAMELESS = ("superseded by", "the model was removed")
"""How the reason begins where a load was given up through no fault of its worker."""


class Tracker:
    """Updates operations, and what they teach of workers and of loads for the next round."""

    def __init__(
        self, operations: Operations, refusals: WorkerRefusals, mutations: Mutations, overheads: Overheads
    ) -> None:
        self._operations = operations
        self._refusals = refusals
        self._mutations = mutations
        self._overheads = overheads

    def on_progress(self, event: ScaleProgress, moment: Moment) -> Operation | None:
        """A worker tells how far it is. Its operation, if that is known."""
        operation = self._operations.get(event.plan_id)
        if operation is None:
            return None
        knew = event.event != "loaded" or operation.all_loaded
        operation.apply(event, moment.monotonic_s)
        # When an earlier planner's plan was made is known by about a message's time only.
        if not knew and operation.all_loaded and not operation.recalled:
            self._overheads.learn(operation.model_hash, operation.loads, operation.made_s, moment.monotonic_s)
        if event.event == "serving" and operation.direction == "mutate":
            self._mutations.done(operation, event.worker_id, moment)
        elif event.event == "serving":
            self._refusals.served(event.worker_id, operation.model)
        if event.event == "failed":
            self._failed(operation, event.worker_id, event.detail, moment)
        return operation

    def on_live_report(self, report: LiveReport, moment: Moment) -> Operation | None:
        """The source of a pair tells what it did. Its operation, if that is known."""
        operation = self._operations.get(report.plan_id)
        if operation is not None:
            operation.apply_live(report, moment.monotonic_s)
        return operation

    def check(self, view: RegistryView, moment: Moment) -> None:
        """End targets that are past their deadline, or whose worker is gone or never took the plan. The registry
        replaces reports that were lost."""
        workers = {w.worker.worker_id: w for w in view.workers}
        for operation in self._operations.running():
            before = {worker_id for worker_id, _ in operation.open_targets}
            operation.check(workers, moment.monotonic_s)
            for worker_id, why in operation.failures.items():
                if worker_id in before:
                    self._failed(operation, worker_id, why, moment)

    def _failed(self, operation: Operation, worker_id: str, why: str, moment: Moment) -> None:
        if operation.direction == "mutate":
            self._mutations.failed(operation, worker_id, why, moment)
        if operation.direction != "out" or operation.recalled or why.startswith(BLAMELESS):
            return
        refuse = self._refusals.excused if why == STARTED_ANEW else self._refusals.failed
        refuse(worker_id, operation.model, why, moment.monotonic_s)


def frees_its_lease(event: ScaleProgress, operation: Operation) -> bool:
    """Whether the reported worker's lease is to be given back: it refused its plan. If it took it, the lease is used
    up, and giving it back changes nothing."""
    return event.event == "failed" and operation.direction != "mutate"
