"""What an instance tells of the attempts that it has: their tokens, their ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.sim.clock import Clock
from bench.sim.streams import Key, Listener
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.generation import StreamPart
from shared.subjects import Process


class TokenReporter:
    """The attempts of one instance that it tells of, or will, in the order in which they came."""

    def __init__(self, clock: Clock, listener: Listener, worker: Process, instance_id: str) -> None:
        self._clock = clock
        self._listener = listener
        self._worker = worker
        self._instance_id = instance_id
        self._requests: dict[Key, ActiveSequence] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, sequence: ActiveSequence) -> bool:
        return self._requests.get(sequence.key) is sequence

    def of(self, key: Key) -> ActiveSequence | None:
        return self._requests.get(key)

    def add(self, sequence: ActiveSequence) -> None:
        """What becomes of it is told by this instance from now on."""
        self._requests[sequence.key] = sequence

    def take_over(self, sequence: ActiveSequence) -> None:
        """It was another instance's, and that it is here now is told."""
        self.add(sequence)
        self._listener.on_taken_over(sequence.key, worker=self._worker, instance_id=self._instance_id)

    def remove(self, sequence: ActiveSequence) -> None:
        """It is another instance's, or nobody's."""
        if sequence in self:
            del self._requests[sequence.key]

    def clear(self) -> list[str]:
        """Tell of nothing any more. Returns the ids of the requests."""
        request_ids = [request_id for request_id, _ in self._requests]
        self._requests.clear()
        return request_ids

    def report(self, outputs: Iterable[StreamPart]) -> None:
        """What they got now."""
        wanted = [output for output in outputs if (output.request_id, output.attempt) in self._requests]
        self._tokens([(o.request_id, o.attempt) for o in wanted if o.token_ids], (self._clock.now_s,))
        for output in wanted:
            key = output.request_id, output.attempt
            if output.error is not None:
                del self._requests[key]
                self._listener.on_failed(key, output.error.as_error())
            elif output.finish_reason is not None:
                self.ended(key)

    def report_run(
        self, requests: Iterable[ActiveSequence], ends_s: Sequence[float], ended: Iterable[ActiveSequence]
    ) -> None:
        """Of decode steps that ended at these times; some requests ended with the last."""
        here = self._requests
        self._tokens([key for s in requests if here.get(key := s.key) is s], ends_s)
        for sequence in ended:
            self.ended(sequence.key)

    def _tokens(self, keys: Sequence[Key], ends_s: Sequence[float]) -> None:
        if keys:
            self._listener.on_tokens(keys, ends_s, worker=self._worker, instance_id=self._instance_id)

    def ended(self, key: Key) -> None:
        """With all its tokens."""
        if self._requests.pop(key, None) is not None:
            self._listener.on_end(key)
