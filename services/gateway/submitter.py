"""Submits requests to the instances to which they were bound."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.active_requests import ActiveRequest
from services.gateway.core.router import Assignment
from services.gateway.core.stream import Phase
from services.gateway.silence_watch import SilenceWatch
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.base import Bus
from shared.errors import BlitzError, DeadlineExceeded
from shared.messages.common import Ack
from shared.messages.generation import DecodePlace, Submit


class Submitter:
    """Makes the Submit RPC of each attempt. Calls ``on_accepted`` with the request's id, or ``on_failed``."""

    def __init__(
        self,
        bus: Bus,
        watch: SilenceWatch,
        tasks: OwnedTasks,
        on_failed: Callable[[ActiveRequest, BlitzError], None],
        clock: Callable[[], float],
        *,
        on_accepted: Callable[[str], None],
        gateway_id: str,
        incarnation: str,
        timeout_s: float,
    ) -> None:
        self._bus = bus
        self._watch = watch
        self._tasks = tasks
        self._on_failed = on_failed
        self._clock = clock
        self._on_accepted = on_accepted
        self._gateway_id = gateway_id
        self._incarnation = incarnation
        self._timeout_s = timeout_s

    def submit(self, request: ActiveRequest, assignment: Assignment) -> None:
        """Begin the next attempt at its assigned instance."""
        stream, route, decode = request.stream, assignment.route, assignment.decode
        decode_at = DecodePlace(worker_id=decode.worker_id, instance_id=decode.instance_id) if decode else None
        stream.submitted_to(route.instance_id, route.worker_id, decode_at, may_wait=assignment.may_wait)
        request.progress_s = self._clock()
        request.asked = False
        request.submitting = True
        self._tasks.start(self._submit(request, stream.attempt), request.context)

    async def _submit(self, request: ActiveRequest, attempt: int) -> None:
        stream = request.stream
        worker_id = stream.worker_id
        message = Submit(
            request_id=stream.request_id,
            attempt=attempt,
            gateway_id=self._gateway_id,
            instance_id=stream.instance_id,
            model=stream.model,
            prompt_token_ids=stream.prompt_token_ids,
            sampling=stream.sampling,
            output_token_ids=tuple(stream.output_token_ids),
            arrived_at_s=stream.arrived_at_s,
            decode_at=stream.decode_at,
            alone_tokens=stream.alone_tokens,
            gateway_incarnation=self._incarnation,
            may_wait=stream.may_wait,
        )
        try:
            await self._bus.request(subjects.worker_submit(worker_id), message, Ack, timeout_s=self._timeout_s)
        except BlitzError as error:
            # Tokens, and another worker that took over, prove acceptance even when the answer was lost; a later
            # attempt is none of ours.
            if stream.attempt == attempt and stream.phase is Phase.SUBMITTED and stream.worker_id == worker_id:
                if isinstance(error, DeadlineExceeded):
                    await self._watch.doubt(request, error)
                else:
                    self._on_failed(request, error)
        else:
            self._watch.spoke(worker_id)
            if stream.attempt == attempt and stream.worker_id == worker_id:
                self._on_accepted(stream.request_id)
        finally:
            if stream.attempt == attempt:
                request.submitting = False
