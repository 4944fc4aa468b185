"""Engine loops on their threads over late engines, and much that happens to their requests meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from services.worker.core.scheduling.schedule import Sampled, ScheduledBatch, SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import Completion, waited
from services.worker.device.late import LateStreams, LateTiming
from services.worker.engine.base import Activation, Engine
from services.worker.engine.late.failures import InjectedFailure, LateFailures
from services.worker.engine.late.late_engine import LateEngine
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.thread import After, EngineThread
from shared.errors import BlitzError
from shared.messages.generation import PromptLogprobs, SamplingParams, StreamPart, TokenLogprobs
from tests.checkpoints import EOS_ID
from tests.services.worker.core.scheduling.harness import PLACE
from tests.services.worker.engine.harness import loaded_engine
from tests.services.worker.engine.late_engines import late

NUM_BLOCKS, BLOCK_SIZE = 14, 4
LIMITS = {"max_num_sequences": 8, "max_batch_tokens": 24, "prefill_chunk_tokens": 5}
"""So little room that decodes preempt."""
WAIT_S = 60.0

BY_ITSELF = ("stop", "length")


def engine_of(kind: str, num_blocks: int = NUM_BLOCKS) -> Engine:
    """One that computes as it is called."""
    if kind == "mock":
        return MockEngine(num_blocks=num_blocks, block_size=BLOCK_SIZE, eos_every=15, verify=True)
    return loaded_engine(kind, num_blocks=num_blocks, block_size=BLOCK_SIZE)


# --- requests, and what they get ------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A request, of which each loop gets a sequence of its own."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    leaves: bool = False
    """It is to be decoded elsewhere."""
    alone: int = 0

    def sequence(self) -> ActiveSequence:
        return ActiveSequence(
            request_id=self.name,
            attempt=0,
            gateway_id="g",
            prompt=self.prompt,
            params=self.params,
            eos_token_ids=(EOS_ID,),
            decode_at=PLACE if self.leaves else None,
            alone_tokens=self.alone,
        )


def drawn(chance: random.Random, count: int, *, alone_share: float = 0.0, scored_share: float = 0.0) -> list[Asked]:
    """Requests of all kinds. ``scored_share``: of those that ask for log-probabilities of their prompts."""
    asked = []
    for number in range(count):
        max_tokens = chance.randint(1, 18)
        penalised = chance.random() < 0.4
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=chance.randrange(1000),
            temperature=chance.choice([0.0, 0.0, 0.8]),
            top_k=chance.choice([0, 40]),
            repetition_penalty=chance.choice([1.0, 1.3]) if penalised else 1.0,
            frequency_penalty=chance.choice([0.0, 0.7]) if penalised else 0.0,
            presence_penalty=0.4 if penalised else 0.0,
            logprobs=chance.choice([None, None, 2]),
            min_tokens=chance.choice([0, 0, min(4, max_tokens)]),
            ignore_eos=chance.random() < 0.2,
            stop_token_ids=tuple(range(chance.randrange(10), 256, 10)) if chance.random() < 0.5 else (),
            prompt_logprobs=2 if scored_share and chance.random() < scored_share else None,
        )
        prompt = tuple(chance.choices(range(32, 127), k=chance.randint(1, 13)))
        alone = chance.randint(1, 3) if chance.random() < alone_share else 0
        asked.append(Asked(f"r{number}", prompt, params, not alone and chance.random() < 0.2, alone))
    return asked


@dataclass
class Text:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: list[PromptLogprobs] = field(default_factory=list)
    end: StreamPart | None = None
    num_ends: int = 0


class Said:
    """Takes a loop's outputs; nothing may come behind an end."""

    def __init__(self) -> None:
        self.texts: dict[str, Text] = {}
        self.wrong: list[str] = []
        self.changed = threading.Condition()

    def __call__(self, step: StepOutput) -> None:
        with self.changed:
            for part in step.prompts:
                self._take_prompt(self.texts.setdefault(part.request_id, Text()), part)
            for out in step.outputs:
                self._take(self.texts.setdefault(out.request_id, Text()), out)
            self.changed.notify_all()

    def _take_prompt(self, text: Text, part: StreamPart) -> None:
        assert part.prompt is not None
        position = text.prompt[-1].end if text.prompt else 1
        if text.token_ids or text.end is not None or part.prompt.start != position:
            self.wrong.append(f"position {part.prompt.start} of a prompt, not {position}, or behind tokens")
        text.prompt.append(part.prompt)

    def _take(self, text: Text, out: StreamPart) -> None:
        if text.end is not None:
            self.wrong.append(f"{out} behind the end")
        if out.offset != len(text.token_ids):
            self.wrong.append(f"{out} behind {len(text.token_ids)} tokens")
        text.token_ids += out.token_ids
        text.logprobs += out.logprobs or ()
        if out.finish_reason is not None:
            text.end = out
            text.num_ends += 1

    def wait(self, count: int, *, without: Sequence[str] = ()) -> None:
        """Until so many have ended, but for those that end nowhere."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_ended >= count - len(without), WAIT_S), "somebody starves"

    @property
    def num_ended(self) -> int:
        return sum(text.end is not None for text in self.texts.values())


def plain_texts(kind: str, asked: Sequence[Asked]) -> dict[str, Text]:
    """What the engine gives that computes as it is called, where nothing happens and there is room."""
    engine, said = engine_of(kind, 256), Said()
    # As long as it may be where there is less room.
    config = SchedulerConfig(num_blocks=256, block_size=BLOCK_SIZE, context_tokens=NUM_BLOCKS * BLOCK_SIZE)
    loop = EngineLoop(engine, config, lambda: 0.0)
    loop.scheduler.table.scores_prompts = True
    for one in asked:
        loop.add(one.sequence())
    while loop.has_work:
        output = loop.step()
        assert output is not None
        said(output)
    assert not said.wrong
    return said.texts


def prompt_of(text: Text) -> list[float]:
    """The log-probabilities of its prompt."""
    return [float(x) for one in text.prompt for x in np.frombuffer(one.logprobs, "<f4")]


def check_text(got: Text, plain: Text, *, exact: bool) -> None:
    """As the plain engine's, as far as it came. ``exact``: so are the probabilities."""
    count = len(got.token_ids)
    mine, theirs = prompt_of(got), prompt_of(plain)
    np.testing.assert_allclose(mine, theirs[: len(mine)], atol=1e-3)
    assert len(mine) == len(theirs) or not count, "of a prompt, all comes before the first token"
    assert got.token_ids == plain.token_ids[:count]
    assert len(got.logprobs) == len(plain.logprobs[:count])
    for one, other in zip(got.logprobs, plain.logprobs, strict=False):
        if exact:
            assert one == other
        else:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert dict(one.top) == pytest.approx(dict(other.top), abs=1e-3)
    assert plain.end is not None
    if got.end is not None and got.end.finish_reason in BY_ITSELF:
        assert count == len(plain.token_ids)
        assert got.end.finish_reason == plain.end.finish_reason


# --- a loop on its thread -------------------------------------------------------------------------


class Pair:
    """Layers of prompts that are computed here beside the steps, as a pair's are: two in flight at most."""

    num_requests = 0
    queued = (0, 0)
    decode_interval_s = 0.002

    def __init__(self, loop: EngineLoop, happened: Counter[str]) -> None:
        self._loop = loop
        self._happened = happened
        self._sequences: list[ActiveSequence] = []
        self._activation: Activation | None = None
        self._num_asked = 0

    @property
    def is_idle(self) -> bool:
        return not self._sequences

    @property
    def ready(self) -> bool:
        return bool(self._sequences) and self._num_asked <= self._loop.engine.num_layers

    def take(self, sequences: Sequence[ActiveSequence]) -> None:
        """They have their blocks."""
        self._sequences, self._activation, self._num_asked = list(sequences), None, 0

    def step(self) -> None:
        if not self.ready:
            return
        loop, engine, begun_s = self._loop, self._loop.engine, time.monotonic()
        if self._activation is None:
            # Those that were cancelled have their blocks until they are released.
            self._activation = engine.embed(loop.batches.of_prompts(self._sequences))
        layer, self._num_asked = self._num_asked, self._num_asked + 1
        if layer < engine.num_layers:
            ran = engine.run_layers(self._activation, layer, layer + 1)
            loop.launch_part(ran, self._sequences, lambda _: None, begun_s=begun_s)
        else:
            sampled = engine.sample(self._activation)
            loop.launch_part(sampled, self._sequences, lambda _: self._sampled(sampled), begun_s=begun_s)

    def _sampled(self, sampled: Completion[list[Sampled]]) -> StepOutput:
        sequences, self._sequences = self._sequences, []
        reservations = self._loop.scheduler.reservations
        if sampled.error is not None:
            reservations.compute_here(sequences)
            return StepOutput(())
        self._happened["adopted"] += len(sequences)
        given = [reservations.adopt(s, token) for s, token in zip(sequences, sampled.result(), strict=True)]
        return StepOutput(tuple(out for out in given if out is not None))

    def ran_layer(self) -> None:
        pass

    def stepped(self, output: StepOutput) -> None:
        pass


class LateLoop:
    """An engine loop on its thread over a late engine, looked at."""

    def __init__(
        self,
        kind: str,
        streams: LateStreams,
        failures: LateFailures | None = None,
        *,
        happened: Counter[str] | None = None,
        make: Callable[..., LateEngine] = late,
        **changes: int,
    ) -> None:
        self.streams = streams
        self.happened = Counter[str]() if happened is None else happened
        self.inner = engine_of(kind)
        self.engine = make(self.inner, streams, failures)
        limits = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, **LIMITS, **changes}
        self.loop = EngineLoop(self.engine, SchedulerConfig(**limits), time.monotonic)
        self.loop.scheduler.table.scores_prompts = True
        self.engine.watch(self.loop.scheduler.pool)
        self.loop.prefill_listener = self
        self.pair = Pair(self.loop, self.happened)
        self.departing: list[ActiveSequence] = []
        """Held: their first token is known, and another instance is to decode them."""
        self.said, self.broke = Said(), list[BlitzError]()
        self.accepted: dict[str, ActiveSequence] = {}
        self.gone: list[str] = []
        """They are decoded elsewhere."""
        self.num_completed = 0
        self._look_at_scheduler()
        self.thread = EngineThread(self.loop, self.said, self.broke.append)

    def _look_at_scheduler(self) -> None:
        scheduler, table = self.loop.scheduler, self.loop.scheduler.table
        schedule, complete, drop = scheduler.schedule, scheduler.complete, scheduler.drop

        def scheduled(now_s: float = 0.0) -> ScheduledBatch | None:
            before = list(table.flight)
            batch = schedule(now_s)
            if batch is not None:
                assert not any(isinstance(one, ScheduledBatch) and one.alone for one in before)
                if batch.alone:
                    assert not before, "it is beside something"
                    assert self.loop.num_in_flight == 0, "it is beside something"
                    self.happened["alone"] += 1
                else:
                    assert not any(piece.sequence.alone for piece in batch.slices)
                self.happened["preempted"] += sum(id(victim) in table.torn for victim in batch.preempted)
                self.happened["behind"] += bool(before)
            scheduler.check()
            return batch

        def completed(batch: ScheduledBatch, *given: Any, **named: Any) -> list[StreamPart]:
            self.num_completed += 1
            limit_tokens = scheduler.config.limit_tokens
            self.happened["surplus"] += sum(
                p.sample and p.sequence.finished and p.sequence.finish_reason(limit_tokens) is not None
                for p in batch.slices
            )
            outputs = complete(batch, *given, **named)
            scheduler.check()
            return outputs

        def dropped(batch: ScheduledBatch) -> None:
            self.happened["behind a failed one"] += 1
            drop(batch)
            scheduler.check()

        scheduler.schedule, scheduler.complete, scheduler.drop = scheduled, completed, dropped  # type: ignore[method-assign]

    def ran_layers(self, sequence: ActiveSequence, start: int, end: int, num_layers: int) -> None:
        """The KV that it is told of is there."""
        if sequence.finished:
            return
        with lost_device():
            self.export(sequence, end, num_layers, num_layers - 1, start)
        self.happened["layers told"] += 1

    def export(self, sequence: ActiveSequence, end: int, last_layer: int, first_layer: int = 0, start: int = 0) -> None:
        table = tuple(sequence.block_table)
        waited(self.engine.export_kv([table], [end], last_layer, first_layer=first_layer, first_tokens=[start]))

    def computed(self, sequence: ActiveSequence, token: Sampled) -> None:
        if not sequence.finished:
            self.departing.append(sequence)

    def add(self, asked: Asked) -> ActiveSequence:
        """Give it to the thread."""
        sequence = asked.sequence()
        self.thread.submit(sequence).result(WAIT_S)
        self.accepted[asked.name] = sequence
        return sequence

    def wait(self) -> None:
        """Until all have ended, but for those that are gone."""
        self.said.wait(len(self.accepted), without=self.gone)

    def end(self) -> None:
        """All has ended, and nothing went wrong."""
        self.thread.stop()
        assert self.thread.join(WAIT_S)
        self.check_end()
        assert self.broke == []
        assert self.loop.scheduler.pool.num_used == 0
        assert self.loop.scheduler.table.flight == []
        assert self.loop.num_requests == 0
        self.loop.scheduler.check()

    def check_end(self) -> None:
        """Whether it broke or not."""
        assert self.engine.num_faults == 0
        assert self.said.wrong == []
        assert self.loop.num_in_flight == 0
        for name in self.accepted:
            text = self.said.texts.get(name, Text())
            assert text.num_ends == (name not in self.gone), name

    def check_texts(self, plain: dict[str, Text], *, exact: bool = True) -> None:
        for name in self.accepted:
            check_text(self.said.texts.get(name, Text()), plain[name], exact=exact)


@contextmanager
def lost_device() -> Iterator[None]:
    """It may be lost, as it was told to be."""
    with suppress(InjectedFailure):
        yield


@contextmanager
def late_loop(kind: str = "mock", failures: LateFailures | None = None, **given: Any) -> Iterator[LateLoop]:
    """Whose thread runs. ``given``: of the timing, or of ``LateLoop``."""
    timing = {name: given.pop(name) for name in ("order", "seed", "delay_s") if name in given}
    streams = LateStreams(LateTiming(**timing))
    try:
        one = LateLoop(kind, streams, failures, **given)
        one.thread.start()
        try:
            yield one
        finally:
            one.thread.stop()
            one.thread.join(WAIT_S)
    finally:
        streams.close()


# --- what happens to them -------------------------------------------------------------------------


class Mishaps:
    """Requests come, are cancelled, held, lent, and taken back, as a seed draws it, while others are in flight."""

    def __init__(self, one: LateLoop, asked: Sequence[Asked], chance: random.Random) -> None:
        self._one = one
        self._thread = one.thread
        self._happened = one.happened
        self._to_come = list(asked)
        self._chance = chance
        self._lent: list[ActiveSequence] = []
        self._holds: list[Future[ActiveSequence | None]] = []
        self._futures: list[Future[Any]] = []

    def run(self) -> None:
        acts = [self._add, self._add, self._add, self._cancel, self._hold, self._hold, self._lend, self._wait_for_all]
        acts += [self._take_back, self._take_back, self._call_and_cancel, self._call_after_one, self._let_go]
        one, chance = self._one, self._chance
        one.loop.partial = one.pair
        try:
            while self._to_come or chance.random() < 0.8:
                self._call(chance.choice(acts))
                if chance.random() < 0.3:
                    time.sleep(chance.random() * 0.002)
            while self._thread.stats().load.running_requests or one.said.num_ended < len(one.accepted) - len(one.gone):
                if one.broke:
                    return
                self._call(self._take_back)
                self._call(self._let_go)
                time.sleep(0.001)
            for future in self._futures:
                if not future.cancelled():
                    future.result(WAIT_S)
        except BlitzError:
            if not one.broke:
                raise

    def _call(self, act: Callable[[EngineLoop], Callable[[], None] | None]) -> None:
        """``act`` on the engine's thread, and what it gives here."""
        rest = self._thread.call(act).result(WAIT_S)
        if rest is not None:
            rest()

    def _add(self, loop: EngineLoop) -> None:
        if self._to_come:
            asked = self._to_come.pop()
            sequence = asked.sequence()
            self._one.accepted[asked.name] = sequence
            loop.add(sequence)

    def _cancel(self, loop: EngineLoop) -> None:
        accepted = list(loop.scheduler.table.accepted.values())
        flying = [s for s in accepted if not loop.is_free(s)]
        if accepted and self._chance.random() < 0.6:
            sequence = self._chance.choice(flying or accepted)
            self._happened["cancelled"] += not loop.is_free(sequence)
            assert loop.scheduler.cancel(*sequence.key) is sequence

    def _hold(self, loop: EngineLoop) -> None:
        """One that is decoded is to move."""
        decoded = [s for s in loop.scheduler.table.running if s.decodes or not loop.is_free(s)]
        if not decoded:
            return
        sequence = self._chance.choice(decoded)
        in_flight = not loop.is_free(sequence)

        def hold(loop: EngineLoop) -> ActiveSequence | None:
            assert loop.is_free(sequence)
            if not loop.scheduler.reservations.hold_to_move(sequence):
                return None
            self._happened["held"] += in_flight
            return sequence

        self._holds.append(self._thread.call(hold, after=sequence))

    def _let_go(self, loop: EngineLoop) -> Callable[[], None] | None:
        """Those that are held are decoded here again, or elsewhere. Their KV was whole when they were held."""
        ended = [future for future in self._holds if future.done()]
        self._holds = [future for future in self._holds if not future.done()]
        held = [s for s in (future.result() for future in ended) if s is not None]
        held, self._one.departing = held + self._one.departing, []
        if not held:
            return None
        ends = [s.num_computed for s in held]

        def copied() -> None:
            with lost_device():
                for sequence, end in zip(held, ends, strict=True):
                    self._one.export(sequence, end, loop.engine.num_layers)
            self._thread.call(let_go).result(WAIT_S)

        def let_go(loop: EngineLoop) -> None:
            for sequence in held:
                if self._chance.random() < 0.75:
                    loop.scheduler.reservations.decode_here(sequence)
                    continue
                if not sequence.finished:
                    self._one.gone.append(sequence.request_id)
                loop.scheduler.reservations.release_to_decoder(sequence)

        return copied

    def _lend(self, loop: EngineLoop) -> None:
        scheduler = loop.scheduler
        scheduler.table.lending = True
        lent = scheduler.lend()
        self._happened["lent"] += len(lent) if loop.num_in_flight else 0
        pair = self._one.pair
        for count in (2, 1) if pair.is_idle and lent else ():
            if scheduler.reservations.reserve(lent[:count]):
                pair.take(lent[:count])
                lent = lent[count:]
                break
        self._lent += lent

    def _take_back(self, loop: EngineLoop) -> None:
        lent, self._lent = self._lent, []
        loop.scheduler.table.lending = False
        self._happened["taken back"] += len(lent) if loop.num_in_flight else 0
        loop.scheduler.take_back(lent)

    def _wait_for_all(self, loop: EngineLoop) -> None:
        in_flight = loop.num_in_flight > 0

        def quiet(loop: EngineLoop) -> None:
            assert loop.is_quiet
            assert loop.num_in_flight == 0
            assert loop.scheduler.table.flight == []
            self._happened["waited for all"] += in_flight

        self._futures.append(self._thread.call(quiet, after=After.ALL))

    def _call_after_one(self, loop: EngineLoop) -> None:
        flying = [s for s in self._one.accepted.values() if not loop.is_free(s)]
        if flying:
            sequence = self._chance.choice(flying)

            def free(loop: EngineLoop) -> None:
                assert loop.is_free(sequence)
                self._happened["waited for one"] += 1

            self._futures.append(self._thread.call(free, after=sequence))

    def _call_and_cancel(self, loop: EngineLoop) -> None:
        """A command that was taken back is not run, wherever it waits."""

        def never(_: EngineLoop) -> None:
            self._one.said.wrong.append("a command that was taken back was run")

        after = self._chance.choice([After.ALL, After.NOTHING])
        assert self._thread.call(never, after=after).cancel()
