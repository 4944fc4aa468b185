"""What waits for a landing, one by one: the engine loop on its thread, over engines that compute later."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import Completion, Landed, Pending
from services.worker.device.late import LateStreams, LateTiming
from services.worker.engine import loop as engine_loop
from services.worker.engine.base import Activation, Engine
from services.worker.engine.forward_batch import ForwardBatch
from services.worker.engine.late.activation import LateActivation
from services.worker.engine.late.failures import LateFailures
from services.worker.engine.late.late_engine import LateEngine
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.settings import MockTiming
from services.worker.engine.thread import After
from services.worker.engine.torch_engine import TorchEngine
from shared.errors import BlitzError, Unavailable
from shared.messages.generation import SamplingParams
from tests.services.worker.device.by_hand import HandStreams
from tests.services.worker.device.waiting import held, settled
from tests.services.worker.engine.late_engines import late
from tests.services.worker.engine.late_loops import WAIT_S, Asked, LateLoop, drawn, late_loop, plain_texts
from tests.services.worker.engine.loops import BLOCK_SIZE, NUM_BLOCKS, make_loop
from tests.services.worker.engine.loops import request as active
from tests.wait_until import eventually_sync

KINDS = ("mock", "llama")


def asked(name: str, prompt: Sequence[int] = (40, 41, 42, 43, 44, 45, 46), max_tokens: int = 12, **given: Any) -> Asked:
    of_asked = {key: given.pop(key) for key in ("leaves", "alone") if key in given}
    params = SamplingParams(max_tokens=max_tokens, seed=1, **{"temperature": 0.0, "ignore_eos": True, **given})
    return Asked(name, tuple(prompt), params, **of_asked)


def several(count: int, **given: Any) -> list[Asked]:
    return [asked(f"r{i}", [50 + i, 60 + i, 70 + i], **given) for i in range(count)]


def penalised(count: int) -> list[Asked]:
    return several(
        count, max_tokens=20, repetition_penalty=1.3, frequency_penalty=0.6, presence_penalty=0.3, logprobs=1
    )


def run(one: LateLoop, requests: Sequence[Asked]) -> None:
    """All to their ends, which are those of the plain engine."""
    for request in requests:
        one.add(request)
    one.wait()


def in_flight(one: LateLoop, count: int) -> None:
    """Wait until so many operations are."""
    eventually_sync(lambda: one.thread.call(lambda loop: loop.num_in_flight).result(WAIT_S) == count)


def texts_of(one: LateLoop, name: str) -> list[int]:
    text = one.said.texts.get(name)
    return [] if text is None else text.token_ids


# --- layers are told, and tokens taken, when they have landed --------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_a_prompt_are_told_when_they_have_landed(kind: str) -> None:
    told: list[int] = []
    with late_loop(kind) as one:
        ran_layers = one.loop.prefill_listener.ran_layers  # type: ignore[union-attr]

        def tell(sequence: ActiveSequence, start: int, end: int, num_layers: int) -> None:
            told.append(num_layers)
            ran_layers(sequence, start, end, num_layers)

        one.ran_layers = tell  # type: ignore[method-assign]
        with held(one.streams):
            one.add(asked("a", range(40, 45), leaves=True))
            in_flight(one, 2)
            time.sleep(0.01)
            assert told == []
        eventually_sync(lambda: one.departing)
        assert told == [1, 2, 3, 4]
        one.thread.call(lambda loop: loop.scheduler.reservations.decode_here(one.departing[0])).result(WAIT_S)
        one.wait()
        one.end()


@pytest.mark.parametrize("kind", KINDS)
def test_two_decode_steps_are_in_flight_and_no_more(kind: str) -> None:
    with late_loop(kind, delay_s=0.001) as one:
        sequence = one.add(asked("a", max_tokens=40))
        eventually_sync(lambda: len(texts_of(one, "a")) >= 2)
        with held(one.streams):
            in_flight(one, 2)
            time.sleep(0.01)
            starts = one.thread.call(
                lambda loop: [piece.start for batch in loop.scheduler.table.flight for piece in batch.slices]  # type: ignore[union-attr]
            ).result(WAIT_S)
            known = sequence.num_tokens
            assert starts == [known - 1, known]
        one.wait()
        one.check_texts(plain_texts(kind, [asked("a", max_tokens=40)]), exact=kind == "mock")
        one.end()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_a_step_in_flight_touches_are_free_when_it_has_landed(kind: str) -> None:
    def used(loop: EngineLoop) -> int:
        return loop.scheduler.pool.num_used

    with late_loop(kind, delay_s=0.001) as one:
        one.add(asked("a", max_tokens=40))
        eventually_sync(lambda: texts_of(one, "a"))
        with held(one.streams):
            in_flight(one, 2)
            assert one.thread.cancel("a", 0).result(WAIT_S)
            time.sleep(0.01)
            assert one.thread.call(used).result(WAIT_S) > 0
        one.wait()
        eventually_sync(lambda: one.thread.call(used).result(WAIT_S) == 0)
        one.end()


# --- what fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row_share", [0.02, 0.1])
def test_a_penalised_row_that_fails_leaves_the_others_their_counts(kind: str, row_share: float) -> None:
    requests = penalised(8)
    plain, num_errors = plain_texts(kind, requests), 0
    for seed in range(6):
        with late_loop(kind, LateFailures(seed=seed, row_share=row_share)) as one:
            run(one, requests)
            one.check_texts(plain, exact=kind == "mock")
            one.end()
            for text in one.said.texts.values():
                if text.end is not None and text.end.error is not None:
                    num_errors += 1
                    assert "a row fails" in text.end.error.message
    assert num_errors >= 5


class ToldOfLate(LateEngine):
    """Some decode steps are computed and sampled, and their layers are said to have failed all the same: by then the
    step behind has drawn, too."""

    num_asked = 0

    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[None]:
        ran = super().run_layers(activation, first, last)
        self.num_asked += last - first > 1
        if last - first == 1 or self.num_asked % 5:
            return ran
        wrong = RuntimeError("the layers were wrong")
        return self._streams.compute.later(Pending[None](), lambda: Landed(error=wrong))


def told_of_late(inner: Engine, streams: LateStreams, failures: LateFailures | None) -> LateEngine:
    return ToldOfLate(inner, streams, failures, cache=inner.cache if isinstance(inner, TorchEngine) else None)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_that_failed_and_the_one_behind_it_drew_is_taken_out_again(kind: str) -> None:
    requests = penalised(4)
    with late_loop(kind, make=told_of_late, delay_s=0.001) as one:
        run(one, requests)
        one.check_texts(plain_texts(kind, requests), exact=kind == "mock")
        one.end()
        assert one.happened["behind a failed one"] >= 1
        assert {text.end.finish_reason for text in one.said.texts.values() if text.end} == {"length"}


class Refusing(LateEngine):
    """Some steps that go on behind a row that is not known raise as they are begun."""

    num_refused = 0
    num_asked = 0

    def embed(self, batch: ForwardBatch) -> LateActivation:
        if any(piece.token_from is not None for piece in batch.slices):
            self.num_asked += 1
            if self.num_asked % 3 == 0:
                self.num_refused += 1
                raise RuntimeError("cannot begin this")
        return super().embed(batch)


@pytest.mark.parametrize("delay_s", [0.0, 0.002])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_cannot_be_begun_leaves_the_one_before_it_what_it_is(kind: str, delay_s: float) -> None:
    def refusing(inner: Engine, streams: LateStreams, failures: LateFailures | None) -> LateEngine:
        return Refusing(inner, streams, failures, cache=inner.cache if isinstance(inner, TorchEngine) else None)

    requests = penalised(5)
    with late_loop(kind, make=refusing, delay_s=delay_s) as one:
        run(one, requests)
        one.check_texts(plain_texts(kind, requests), exact=kind == "mock")
        one.end()
        assert isinstance(one.engine, Refusing)
        assert one.engine.num_refused >= 2
        assert {text.end.finish_reason for text in one.said.texts.values() if text.end} == {"length"}


def test_a_step_that_cannot_be_begun_is_work_though_nothing_else_is_left() -> None:
    streams = LateStreams(LateTiming())
    engine = LateEngine(MockEngine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), streams)
    loop = make_loop(engine, clock=time.monotonic)
    loop.add(a := active("a", max_tokens=9))

    def step_until(is_so: Callable[[], bool]) -> None:
        eventually_sync(lambda: (loop.step(), is_so())[1])

    step_until(lambda: bool(a.output))
    loop.halts = True
    step_until(lambda: loop.is_quiet)
    loop.halts = False
    embed, refused = engine.embed, list[ForwardBatch]()

    def refuses_the_second(batch: ForwardBatch) -> LateActivation:
        if loop.num_in_flight:
            refused.append(batch)
            raise RuntimeError("an error of long ago")
        return embed(batch)

    engine.embed = refuses_the_second  # type: ignore[method-assign]
    with held(streams):
        assert loop.step() is None
        assert refused
        loop.scheduler.cancel("a", a.attempt)
    try:
        eventually_sync(lambda: loop.has_work and (loop.step(), loop.is_quiet)[1])
        assert not loop.has_work
        assert loop.scheduler.pool.num_used == 0
    finally:
        streams.close()


@pytest.mark.parametrize("prefills", [True, False])
def test_a_step_whose_layers_cannot_be_asked_for_waits_for_what_it_is_begun_with(
    monkeypatch: pytest.MonkeyPatch, prefills: bool
) -> None:
    """Its request is cancelled meanwhile: that is still to be embedded, from its blocks."""
    streams = HandStreams()
    engine = LateEngine(MockEngine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), cast(LateStreams, streams))
    monkeypatch.setattr(engine_loop, "waited", streams.wait)
    loop = make_loop(engine)
    engine.watch(loop.scheduler.pool)
    run_layers, refused = engine.run_layers, list[int]()

    def refuse_one(activation: Activation, first: int, last: int) -> Completion[None]:
        if not refused:
            refused.append(first)
            raise RuntimeError("cannot begin this")
        return run_layers(activation, first, last)

    loop.add(a := active("a", max_tokens=9))
    while not prefills and not a.output:
        if loop.step() is None:
            streams.run(streams.compute)
    monkeypatch.setattr(engine, "run_layers", refuse_one)
    assert loop.step() is None
    assert refused == [0]
    loop.scheduler.cancel("a", a.attempt)
    assert prefills == (streams.num_queued == 1), "it is alone, or behind another"
    streams.run(streams.compute, streams.num_queued - 1)
    loop.step()
    assert loop.num_in_flight == 1
    assert loop.scheduler.pool.num_used
    streams.run(streams.compute)
    while loop.has_work:
        loop.step()
    assert loop.scheduler.pool.num_used == 0
    assert engine.num_faults == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_is_lost_ends_all_once_and_the_thread(kind: str) -> None:
    requests = several(10, max_tokens=15)
    plain = plain_texts(kind, requests)
    for device_after in (0, 3, 7, 20, 31, 50):
        for delay_s in (0.0, 0.001):
            with late_loop(kind, LateFailures(device_after=device_after), delay_s=delay_s) as one:
                for request in requests:
                    with suppress(BlitzError):
                        one.add(request)
                assert one.thread.join(WAIT_S)
                assert [error.code for error in one.broke] == ["engine_broken"]
                one.check_end()
                one.check_texts(plain, exact=kind == "mock")
                codes = {text.end.error.code for text in one.said.texts.values() if text.end and text.end.error}
                assert codes == {"engine_broken"}
                assert not one.streams.compute.queued


def cache_bytes(one: LateLoop) -> list[bytes]:
    engine = one.inner
    assert isinstance(engine, TorchEngine)
    return [page.view(torch.uint8).numpy().tobytes() for pages in (engine.cache.k, engine.cache.v) for page in pages]


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("prefills", [False, True])
def test_a_loop_that_breaks_waits_for_what_is_in_flight(lost: bool, prefills: bool) -> None:
    def break_it(loop: EngineLoop) -> None:
        loop.step = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        if lost:
            one.inner.run_layers = one.inner.sample = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]

    with late_loop("llama", delay_s=0.001) as one:
        if not prefills:
            one.add(asked("a", max_tokens=40))
            eventually_sync(lambda: texts_of(one, "a"))
        with held(one.streams):
            if prefills:
                one.add(asked("a", range(40, 45), max_tokens=40))
            in_flight(one, 2)
            one.thread.call(break_it).result(WAIT_S)
            assert not one.thread.join(0.02), "something is in flight"
        assert one.thread.join(WAIT_S)
        before = cache_bytes(one)
        settled(one.streams.compute.run(lambda: None))
        assert cache_bytes(one) == before
        one.check_end()
        assert [error.code for error in one.broke] == ["engine_broken"]
        assert one.said.texts["a"].end is not None
        assert one.said.texts["a"].end.error is not None
        assert one.said.texts["a"].end.error.code == "engine_broken"


# --- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefills", [False, True])
def test_stop_begins_nothing_more(prefills: bool) -> None:
    requests = several(3, max_tokens=40)
    with late_loop(delay_s=0.001) as one:
        for request in requests:
            one.add(request)
        if not prefills:
            eventually_sync(lambda: all(texts_of(one, r.name) for r in requests))
        num_steps: list[int] = []

        def stop(loop: EngineLoop) -> None:
            one.thread.stop()
            num_steps.append(one.num_completed + len(loop.scheduler.table.flight))

        one.thread.call(stop).result(WAIT_S)
        assert one.thread.join(WAIT_S)
        one.end()
        assert [one.num_completed] == num_steps


@pytest.mark.parametrize("prefills", [False, True])
def test_stop_delivers_what_has_begun_and_nothing_is_written_after_it(prefills: bool) -> None:
    requests = several(3, max_tokens=40)
    with late_loop("llama", delay_s=0.001) as one:
        if not prefills:
            for request in requests:
                one.add(request)
            eventually_sync(lambda: all(len(texts_of(one, r.name)) > 1 for r in requests))
        begun: dict[str, int] = {}

        def stop(loop: EngineLoop) -> None:
            for name, sequence in one.accepted.items():
                pieces = [p for b in loop.scheduler.table.flight for p in b.slices]  # type: ignore[union-attr]
                begun[name] = len(sequence.output) + sum(p.sample for p in pieces if p.sequence is sequence)
            one.thread.stop(Unavailable("that was it"))

        ran: list[str] = []
        with held(one.streams):
            if prefills:
                for request in requests:
                    one.add(request)
            in_flight(one, 2)
            waits = one.thread.call(lambda _: ran.append("before"), after=After.ALL)
            one.thread.call(stop).result(WAIT_S)
            late = [
                one.thread.call(lambda _: ran.append("after"), after=after)
                for after in (After.ALL, After.NOTHING, *one.accepted.values())
            ]
            taken_back = one.thread.call(lambda _: ran.append("never"), after=After.ALL)
            assert taken_back.cancel()
            assert not one.thread.join(0.02)
        assert one.thread.join(WAIT_S)
        before = cache_bytes(one)
        settled(one.streams.compute.run(lambda: None))
        assert cache_bytes(one) == before
        assert waits.exception(0) is None
        for future in late:
            with suppress(CancelledError):
                assert future.exception(0) is None or isinstance(future.exception(0), Unavailable)
        assert "before" in ran
        assert "never" not in ran
        assert {name: len(texts_of(one, name)) for name in begun} == begun
        assert prefills or min(begun.values()) > 2
        one.end()
        one.check_texts(plain_texts("llama", requests), exact=False)
        for text in one.said.texts.values():
            assert text.end is not None
            assert text.end.error is not None
            assert text.end.error.message == "that was it"


@pytest.mark.parametrize("kind", KINDS)
def test_stop_at_any_time(kind: str) -> None:
    requests = drawn_requests()
    plain = plain_texts(kind, requests)
    for seed in range(8):
        with late_loop(kind, LateFailures(seed=seed, step_share=0.01), seed=seed, delay_s=0.0005) as one:
            for request in requests:
                one.add(request)
            time.sleep(0.002 * seed)
            one.thread.stop()
            assert one.thread.join(WAIT_S)
            if not one.broke:
                one.end()
            one.check_end()
            one.check_texts(plain, exact=kind == "mock")


def drawn_requests(**given: float) -> list[Asked]:
    """None of which leaves."""
    return [replace(request, leaves=False) for request in drawn(random.Random(3), 24, **given)]


# --- commands that wait ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_for_when_all_has_landed_runs_then_though_requests_go_on_coming(kind: str) -> None:
    ran: list[int] = []

    def quiet(loop: EngineLoop) -> None:
        assert loop.is_quiet
        assert loop.num_in_flight == 0
        assert not loop.scheduler.table.flight
        ran.append(1)

    with late_loop(kind, delay_s=0.001, max_queued_requests=1000) as one:
        futures = []
        for number in range(60):
            one.add(asked(f"r{number}", [40 + number, 50], max_tokens=6))
            if number % 6 == 2:
                futures.append(one.thread.call(quiet, after=After.ALL))
                assert one.thread.call(lambda _: ran.append(99), after=After.ALL).cancel()
        for future in futures:
            future.result(WAIT_S)
        one.wait()
        one.end()
        assert ran == [1] * len(futures)


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_for_when_a_request_has_landed_runs_then_and_the_others_go_on(kind: str) -> None:
    requests = [asked("long", max_tokens=40), *several(30, max_tokens=6)]
    with late_loop(kind, delay_s=0.001) as one:
        long = one.add(requests[0])
        eventually_sync(lambda: texts_of(one, "long"))
        beside: list[int] = []
        flew: list[bool] = []

        def ask(loop: EngineLoop) -> Any:
            flew.append(not loop.is_free(long))
            return one.thread.call(held_now, after=long)

        def held_now(loop: EngineLoop) -> bool:
            assert loop.is_free(long)
            beside.append(loop.num_in_flight)
            was_held = loop.scheduler.reservations.hold_to_move(long)
            end = long.num_computed
            if was_held:
                one.export(long, end, loop.engine.num_layers)
                loop.scheduler.reservations.decode_here(long)
            return was_held

        was_held = []
        for request in requests[1:]:
            one.add(request)
            was_held.append(one.thread.call(ask).result(WAIT_S).result(WAIT_S))
        one.wait()
        one.end()
        one.check_texts(plain_texts(kind, requests), exact=kind == "mock")
        assert sum(flew) >= 5
        assert sum(was_held) >= 5
        assert any(beside), "it waits for the others, too"


# --- requests that are computed alone --------------------------------------------------------------


class Alone:
    """Hears of steps that are of one request."""

    def __init__(self, one: LateLoop) -> None:
        self._one = one
        self._now: ActiveSequence | None = None
        self.num_steps = 0

    def begins(self, sequence: ActiveSequence) -> None:
        assert self._now is None
        self._now = sequence
        assert self._one.loop.num_in_flight == 0

    def ended(self, sequence: ActiveSequence) -> None:
        assert self._now is sequence
        self._now = None
        self.num_steps += 1
        assert self._one.loop.num_in_flight == 0
        text = self._one.said.texts.get(sequence.request_id)
        assert sequence.num_emitted == (0 if text is None else len(text.token_ids)), "what it brought was sent before"


class Endless:
    """Layers of a pair's batches that never come to an end: two in flight, always."""

    num_requests = 0
    queued = (0, 0)
    ready = True

    def __init__(self, one: LateLoop, decode_interval_s: float) -> None:
        self._one = one
        self.decode_interval_s = decode_interval_s
        self.num_layers = 0

    def step(self) -> None:
        assert not any(getattr(batch, "alone", False) for batch in self._one.loop.scheduler.table.flight)
        self.num_layers += 1
        ran = self._one.streams.compute.run(lambda: time.sleep(0.001))
        self._one.loop.launch_part(ran, (), lambda _: StepOutput(()), begun_s=time.monotonic())

    def ran_layer(self) -> None:
        pass

    def stepped(self, output: StepOutput) -> None:
        pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delay_s", [0.0, 0.001])
def test_a_request_that_is_computed_alone_is_beside_nothing_and_its_steps_are_told(kind: str, delay_s: float) -> None:
    requests = drawn_requests(alone_share=0.3)
    with late_loop(kind, delay_s=delay_s) as one:
        one.loop.step_listener = alone = Alone(one)
        run(one, requests)
        one.end()
        one.check_texts(plain_texts(kind, requests), exact=kind == "mock")
        assert alone.num_steps == one.happened["alone"] >= 5
        assert one.happened["behind"] >= 5, "without them, the others are two in flight again"


@pytest.mark.parametrize("alone", [0, 3])
def test_decodes_go_on_beside_layers_without_end(alone: int) -> None:
    requests = [asked("a", [40], max_tokens=50), asked("b", [80, 81], max_tokens=6, alone=alone)]
    with late_loop(delay_s=0.0005) as one:
        one.add(requests[0])
        eventually_sync(lambda: texts_of(one, "a"))
        endless = Endless(one, 0.002)
        one.loop.step_listener = Alone(one)

        def attach(loop: EngineLoop) -> None:
            loop.add(sequence)
            loop.partial = endless

        one.accepted["b"] = sequence = requests[1].sequence()
        one.thread.call(attach).result(WAIT_S)
        eventually_sync(lambda: one.said.num_ended)
        assert len(texts_of(one, "b")) == 6
        assert 7 <= len(texts_of(one, "a")) < 50
        assert 10 < endless.num_layers < 1000
        one.thread.call(lambda loop: setattr(loop, "partial", None)).result(WAIT_S)
        one.wait()
        one.end()
        one.check_texts(plain_texts("mock", requests))


# --- times -----------------------------------------------------------------------------------------

LAYER_S = 0.002


def test_busy_times_and_speeds_are_those_of_the_device_with_two_in_flight() -> None:
    def timed(_: Engine, streams: LateStreams, failures: LateFailures | None) -> LateEngine:
        timing = MockTiming(layer_base_s=LAYER_S)
        return late(MockEngine(num_blocks=64, block_size=4, timing=timing), streams, failures)

    with late_loop(make=timed, num_blocks=64) as one:
        began_s = time.monotonic()
        run(one, several(4, max_tokens=40))
        one.thread.stop()
        assert one.thread.join(WAIT_S)
        wall_s = time.monotonic() - began_s
        stats = one.thread.stats()
        step_s = LAYER_S * one.engine.num_layers
        assert one.num_completed * step_s * 0.9 < stats.busy_s_total <= wall_s
        assert step_s * 0.9 < stats.speed.decode_base_s + 4 * stats.speed.decode_request_s < step_s * 3
        assert one.happened["behind"] > 20
