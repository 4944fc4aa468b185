"""What the other gateways want from a model's instances, according to the reports that they publish.

Each gateway places requests by itself. While others have requests for a model too, it counts their load at the
instances (``Bookings``), and leaves them their share of what waits there; alone, it takes everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages.load import ModelQueue, QueueReport

FRESH_S = 2.0
"""A gateway that has not reported for longer (it does every 0.1 s) wants nothing."""


@dataclass(frozen=True, slots=True)
class Contention:
    """Of one model."""

    num_gateways: int = 1
    """Those with requests for the model, this one included."""
    head_tokens: int = 0
    """The largest prompt that is next in another gateway's queue."""
    waiting: bool = False
    """Whether another gateway has requests that wait."""


ALONE = Contention()


class OtherGateways:
    """The latest reports by gateway."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._reports: dict[str, tuple[float, dict[str, ModelQueue]]] = {}

    def take(self, report: QueueReport, now_s: float) -> None:
        """Keep a report; one of this gateway's own is ignored."""
        if report.gateway_id == self._gateway_id:
            return
        wanted = {queue.model: queue for queue in report.models if queue.queued_requests or queue.inflight_requests}
        if wanted or report.gateway_id in self._reports:
            self._reports[report.gateway_id] = (now_s, wanted)

    def expire(self, now_s: float) -> None:
        """Forget the gateways that fell silent."""
        self._reports = {name: row for name, row in self._reports.items() if now_s - row[0] <= FRESH_S}

    def queued(self, model: str) -> int:
        """Requests that wait in the others' queues."""
        return sum(queues[model].queued_requests for _, queues in self._reports.values() if model in queues)

    def about(self, model: str) -> Contention:
        """What the others want of that model."""
        wanted = [queues[model] for _, queues in self._reports.values() if model in queues]
        if not wanted:
            return ALONE
        return Contention(
            num_gateways=1 + len(wanted),
            head_tokens=max(queue.head_tokens for queue in wanted),
            waiting=any(queue.queued_requests for queue in wanted),
        )
