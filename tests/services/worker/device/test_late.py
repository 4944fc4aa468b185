"""Streams that run later than they are given operations."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from services.worker.device.completion import Completion, combined
from services.worker.device.late import LateStreams, LateTiming
from shared.errors import Unavailable
from tests.services.worker.device.waiting import held, wait

MakeStreams = Callable[..., LateStreams]


@pytest.fixture
def streams_of() -> Iterator[MakeStreams]:
    made: list[LateStreams] = []

    def make(**timing: object) -> LateStreams:
        made.append(LateStreams(LateTiming(**timing)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for streams in made:
        streams.close()


def order_of(streams: LateStreams, given: str) -> str:
    """In which order operations run that were all given before the first could. c: compute, o: out, i: into."""
    ran: list[str] = []
    of = {"c": streams.compute, "o": streams.out, "i": streams.into}
    with held(streams):
        completions = [of[name].run(lambda name=name: ran.append(name)) for name in given]
        assert not any(completion.done for completion in completions)
        assert ran == []
    wait(combined(*completions))
    return "".join(ran)


def test_copies_go_first_or_last_where_several_streams_have_work(streams_of: MakeStreams) -> None:
    assert order_of(streams_of(order="copies_first"), "ccioci") == "oiiccc"
    assert order_of(streams_of(order="copies_last"), "icoci") == "ccoii"


def test_a_seed_draws_which_stream_is_next(streams_of: MakeStreams) -> None:
    given = "coi" * 6
    orders = [order_of(streams_of(order="drawn", seed=seed), given) for seed in (1, 1, 2, 3)]
    assert orders[0] == orders[1]
    assert len(set(orders)) == 3
    assert all(sorted(order) == sorted(given) for order in orders)


@pytest.mark.parametrize("order", ["copies_first", "copies_last", "drawn"])
def test_a_stream_keeps_its_order_whatever_is_drawn(streams_of: MakeStreams, order: str) -> None:
    streams = streams_of(order=order, seed=5, delay_s=0.002)
    ran: dict[int, list[int]] = {0: [], 1: [], 2: []}
    threads: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}
    chance, completions = random.Random(1), []
    for number in range(60):
        of = chance.randrange(3)

        def operation(of: int = of, number: int = number) -> int:
            threads[of].add(threading.current_thread().name)
            ran[of].append(number)
            return number

        completions.append((streams.compute, streams.out, streams.into)[of].run(operation))
    assert wait(combined(*completions)) == tuple(range(60))
    assert all(numbers == sorted(numbers) for numbers in ran.values())
    assert threads == {0: {"late-compute"}, 1: {"late-out"}, 2: {"late-into"}}


def test_a_stream_whose_operation_waits_for_its_delay_lets_others_go_on(
    streams_of: MakeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = 4
    chance = random.Random(seed)
    first_s, second_s = chance.uniform(0.0, 1000.0), chance.uniform(0.0, 1000.0)
    assert first_s > second_s + 1.0
    now_s = 0.0
    monkeypatch.setattr("services.worker.device.late.time", SimpleNamespace(monotonic=lambda: now_s))
    streams = streams_of(order="copies_first", seed=seed, delay_s=1000.0)
    copy, step = streams.out.run(lambda: 1), streams.compute.run(lambda: 2)
    now_s = second_s + 0.5
    behind = streams.compute.run(lambda: 3)  # what is given makes them look at the clock again
    assert wait(step) == 2
    assert not copy.done
    assert not behind.done
    now_s = 3000.0
    streams.into.run(lambda: 4)
    assert wait(combined(copy, behind)) == (1, 3)


def test_an_error_and_the_seconds_are_those_of_the_operation(streams_of: MakeStreams) -> None:
    streams = streams_of()
    failed: Completion[float] = streams.into.run(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wait(failed)
    ran = streams.compute.run(lambda: sum(range(1000)))
    assert wait(ran) == 499500
    assert ran.device_s > 0.0


def test_who_is_told_runs_on_the_streams_thread_and_may_give_more(streams_of: MakeStreams) -> None:
    streams, told, more = streams_of(), [], []
    done = threading.Event()

    def go_on() -> None:
        told.append(threading.current_thread().name)
        more.append(streams.out.run(lambda: 2))
        more[0].then(done.set)

    with held(streams):
        streams.compute.run(lambda: 1).then(go_on)
    assert done.wait(30)
    assert told == ["late-compute"]
    assert more[0].result() == 2


def test_what_has_not_begun_fails_when_it_is_closed_and_the_threads_end() -> None:
    before = threading.active_count()
    streams = LateStreams()
    began, go = threading.Event(), threading.Event()
    running = streams.compute.run(lambda: (began.set(), go.wait(30), 7)[-1])
    assert began.wait(30)
    left = [streams.compute.run(lambda: 1), streams.out.run(lambda: 2)]
    left[0].then(go.set)  # the operation that runs ends only once this was given up
    streams.close()
    assert wait(running) == 7
    for completion in (*left, streams.into.run(lambda: 3)):
        with pytest.raises(Unavailable, match="closed"):
            wait(completion)
    assert threading.active_count() == before


def test_a_process_ends_while_a_stream_runs() -> None:
    code = (
        "import threading\n"
        "from services.worker.device.late import LateStreams\n"
        "streams, began = LateStreams(), threading.Event()\n"
        "streams.compute.run(lambda: (began.set(), threading.Event().wait()))\n"
        "assert began.wait(30)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
