"""Small schedulers with requests in them, and what tests ask of those."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis.stateful import RuleBasedStateMachine

from services.worker.core.scheduling.schedule import Sampled, ScheduledBatch, SchedulerConfig
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.mock.tokens import next_token
from shared.errors import Internal, Overloaded
from shared.messages.common import ErrorInfo
from shared.messages.generation import DecodePlace, SamplingParams, StreamPart
from tests.processes import INCARNATION

PLACE = DecodePlace(worker_id="w1", incarnation=INCARNATION, instance_id="i1")
ERROR = ErrorInfo.of(Internal("boom"))


def config(**changes: int) -> SchedulerConfig:
    return SchedulerConfig(**{"num_blocks": 64, "block_size": 4, **changes})


def request(
    name: str,
    prompt_tokens: int = 5,
    max_tokens: int = 4,
    *,
    gateway: str = "g",
    output: tuple[int, ...] = (),
) -> ActiveSequence:
    prompt = [(sum(map(ord, name)) * 7 + i) % 90 for i in range(prompt_tokens)]
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    return ActiveSequence(request_id=name, attempt=0, gateway_id=gateway, prompt=prompt, params=params, output=output)


def lending(*sequences: ActiveSequence, **changes: int) -> Scheduler:
    """A scheduler that has these requests, and lends."""
    scheduler = Scheduler(config(**changes))
    for number, sequence in enumerate(sequences):
        scheduler.add(sequence, float(number))
    scheduler.table.lending = True
    return scheduler


def sampled(sequence: ActiveSequence) -> Sampled:
    return Sampled(next_token(sequence.tokens))


def step(scheduler: Scheduler) -> list[StreamPart]:
    """One step; ``schedule`` must have something."""
    batch = scheduler.schedule()
    assert batch is not None
    return scheduler.complete(batch, [sampled(p.sequence) for p in batch.slices if p.sample])


def fail(scheduler: Scheduler, batch: ScheduledBatch, error: ErrorInfo) -> list[StreamPart]:
    """The batch in flight could not be computed: its requests end with ``error``."""
    return scheduler.complete(batch, (), dict.fromkeys(range(len(batch.slices)), error))


def names(sequences: Iterable[ActiveSequence]) -> list[str]:
    return [s.request_id for s in sequences]


def in_batch(scheduler: Scheduler) -> list[str]:
    """Whose tokens the next step computes."""
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.complete(batch, [sampled(p.sequence) for p in batch.slices if p.sample])
    return [p.sequence.request_id for p in batch.slices]


def departing(name: str, prompt_tokens: int = 5, max_tokens: int = 4, *, gateway: str = "g") -> ActiveSequence:
    """A request that is to be decoded elsewhere."""
    sequence = request(name, prompt_tokens, max_tokens, gateway=gateway)
    sequence.decode_at = PLACE
    return sequence


def held(*sequences: ActiveSequence, **changes: int) -> Scheduler:
    """A scheduler that has computed these requests' prompts; who waits for them has been told."""
    scheduler = Scheduler(config(**changes))
    for sequence in sequences:
        scheduler.add(sequence)
    while any(not s.num_emitted for s in sequences):
        step(scheduler)
    scheduler.reservations.take_prefilled()
    scheduler.check()
    return scheduler


def expected(sequence: ActiveSequence, count: int) -> list[int]:
    tokens = list(sequence.prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(sequence.prompt) :]


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler with little room, what it was given, and what it said."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=10,
                block_size=2,
                max_num_sequences=4,
                max_batch_tokens=7,
                prefill_chunk_tokens=3,
                max_queued_requests=5,
            )
        )
        self.all: dict[str, ActiveSequence] = {}
        self.accepted: set[str] = set()
        self.left: set[str] = set()
        """They are another instance's now."""
        self.flying: ScheduledBatch | None = None
        self.tokens: dict[str, list[int]] = {}
        self.endings: dict[str, str] = {}

    def make(self, prompt_tokens: int, max_tokens: int, *, gateway: str = "g") -> ActiveSequence:
        name = f"r{len(self.all)}"
        sequence = self.all[name] = request(name, prompt_tokens, max_tokens, gateway=gateway)
        self.tokens[name] = []
        return sequence

    def offer(self, sequence: ActiveSequence) -> None:
        """Add it, if there is room in the queue."""
        try:
            self.scheduler.add(sequence)
        except Overloaded:
            return
        self.accepted.add(sequence.request_id)

    def record(self, outputs: Iterable[StreamPart | None]) -> None:
        for out in outputs:
            if out is None:
                continue
            name = out.request_id
            assert name not in self.endings, "output after the terminal"
            assert name not in self.left, "output of a request that is another's"
            assert out.offset == len(self.tokens[name])
            self.tokens[name] += out.token_ids
            if out.finish_reason is not None:
                self.endings[name] = out.finish_reason

    def complete(self, *, fails: bool) -> None:
        """What is in flight is computed, or cannot be."""
        batch, self.flying = self.flying, None
        assert batch is not None
        self.record(self.scheduler.take_ended())
        if fails:
            self.record(fail(self.scheduler, batch, ERROR))
        else:
            self.record(self.scheduler.complete(batch, [sampled(p.sequence) for p in batch.slices if p.sample]))

    def check_end(self) -> None:
        """Nothing is left; every request ended once, here or elsewhere, with the right tokens."""
        assert not self.scheduler.has_work
        assert self.scheduler.pool.num_used == self.scheduler.num_requests == 0
        assert set(self.endings) | self.left == self.accepted
        assert not set(self.endings) & self.left
        for name in self.accepted:
            assert self.tokens[name] == expected(self.all[name], len(self.tokens[name]))
        for name, reason in self.endings.items():
            sequence, got = self.all[name], self.tokens[name]
            assert reason != "length" or len(got) == min(sequence.params.max_tokens, 20 - len(sequence.prompt))
