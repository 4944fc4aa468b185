"""Splits of the waiting batches of pairs, on demand and beside the rounds: which are looked for, and which are used.

``core/live/split.assign`` looks for one, from a ``SplitRequest``.
"""

from __future__ import annotations

from services.planner.core.live.request import SplitRequest, gates_in_time, split_request
from services.planner.core.live.split import SplitResult
from services.planner.core.operations.operations import Operations
from services.planner.core.operations.pair_record import LivePair
from shared.errors import Conflict, NotFound
from shared.messages.live import PlanSplit, ZigzagAssignment


class Splits:
    """Times are monotonic."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def request(self, asked: PlanSplit, now_s: float) -> tuple[LivePair, SplitRequest | None]:
        """The pair that asks, and what it asks for; None: nothing can be gained. Raises ``NotFound``, ``Conflict`` if
        the pair is over, ``BadRequest`` for times that cannot be."""
        pair = self._operations.pair(asked.pair_id)
        if pair is None:
            raise NotFound(f"no pair {asked.pair_id!r} is known", param="pair_id")
        if not pair.running:
            raise Conflict(f"pair {asked.pair_id} is {pair.outcome}; its batches stay as they are")
        operation = self._operations.get(pair.assignment.plan_id)
        if operation is None:
            return pair, None
        ready_s = operation.layers_ready_s(pair.assignment.target.worker_id)
        request = split_request(asked, pair.assignment, now_s - operation.made_s, ready_s=ready_s)
        # The baselines use no gates.
        return pair, request if pair.assignment.policy == "zigzag" else None

    def is_of_use(self, pair: LivePair, now_s: float) -> bool:
        """Whether gates may help. A target that has everything stops nowhere: they would only hold its source up."""
        operation = self._operations.get(pair.assignment.plan_id)
        target = pair.assignment.target.worker_id
        return pair.running and operation is not None and operation.still_loads(target, now_s)

    def gates(self, pair: LivePair, found: SplitResult, elapsed_s: float, now_s: float) -> ZigzagAssignment | None:
        """The revision to be told to both members; None if the split comes too late, ``elapsed_s`` after it was asked
        for, or gains nothing."""
        gates = gates_in_time(found, elapsed_s)
        if not gates or not self.is_of_use(pair, now_s):
            return None
        return pair.set_gates(gates)
