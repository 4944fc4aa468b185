"""Which process owns each worker's id. A second one that lives is refused.

Rules
- The first process to report under an id owns it, and keeps it as long as it answers.
- A report of another process is taken once the owner does not answer: it is dead, and the new process replaces it.
- A report that says goodbye is never refused: it removes only the entry of its own process.
"""

from __future__ import annotations

from shared.messages.registry import WorkerHeartbeat

MAX_OWNERS = 100_000
"""Beyond that, the owners that have not reported for longest are forgotten: any process can take their ids."""


class IdOwners:
    """The incarnations by worker id, as this process has heard."""

    def __init__(self) -> None:
        self._incarnations: dict[str, str] = {}

    def rival(self, report: WorkerHeartbeat) -> str | None:
        """The incarnation that owns the report's id, if it is another one: it must be dead for the report to count."""
        known = self._incarnations.get(report.worker.worker_id)
        return None if report.leaving or known == report.worker.incarnation else known

    def take(self, report: WorkerHeartbeat) -> None:
        """The report counts: its process owns the id, or gives it up."""
        worker_id, incarnation = report.worker.worker_id, report.worker.incarnation
        known = self._incarnations.get(worker_id)
        if report.leaving and known != incarnation:
            return
        # Also for the order: the first one is the one that has not reported for longest.
        self._incarnations.pop(worker_id, None)
        if not report.leaving:
            self._incarnations[worker_id] = incarnation
            if len(self._incarnations) > MAX_OWNERS:
                del self._incarnations[next(iter(self._incarnations))]
