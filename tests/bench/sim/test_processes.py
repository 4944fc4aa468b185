"""What goes on in virtual time, written in its order."""

from __future__ import annotations

from bench.sim.clock import Clock
from bench.sim.processes import Process, Signal, Steps


class Log:
    def __init__(self) -> None:
        self.clock = Clock()
        self.signal = Signal()
        self.lines: list[tuple[float, str]] = []

    def say(self, what: str) -> None:
        self.lines.append((self.clock.now_s, what))

    def wait(self, wait: object, name: str) -> Steps:
        self.say(f"{name} waits")
        yield wait
        self.say(f"{name} goes on")


def test_it_waits_for_a_time_and_for_what_others_do() -> None:
    log = Log()

    def steps() -> Steps:
        yield from log.wait(2.0, "a")
        yield from log.wait(log.signal, "b")
        return "done"

    process = Process(log.clock, steps())
    log.clock.at(1.0, log.signal.fire)  # nobody waits for it yet
    log.clock.at(5.0, log.signal.fire)
    log.clock.run()
    assert log.lines == [(0.0, "a waits"), (2.0, "a goes on"), (2.0, "b waits"), (5.0, "b goes on")]
    assert process.over


def test_a_wait_with_a_deadline_ends_once_by_whichever_comes_first() -> None:
    for fires_s, ends_s in ((1.0, 1.0), (9.0, 3.0)):
        log = Log()
        Process(log.clock, log.wait((log.signal, 3.0), "a"))
        log.clock.at(fires_s, log.signal.fire)
        log.clock.at(10.0, log.signal.fire)
        log.clock.run()
        assert log.lines == [(0.0, "a waits"), (ends_s, "a goes on")]


def test_those_who_wait_go_on_in_the_order_in_which_they_came_each_once() -> None:
    log = Log()
    for name in "abc":
        Process(log.clock, log.wait(log.signal, name))
    log.clock.at(1.0, log.signal.fire)
    log.clock.at(1.0, log.signal.fire)
    log.clock.run()
    assert [line for at_s, line in log.lines if at_s] == ["a goes on", "b goes on", "c goes on"]


def test_stopped_it_goes_no_further_whatever_it_waited_for() -> None:
    for wait in (2.0, Signal()):
        log = Log()
        process = Process(log.clock, log.wait(wait, "a"))
        log.clock.run(1.0)
        process.stop()
        if isinstance(wait, Signal):
            wait.fire()
        log.clock.run()
        assert log.lines == [(0.0, "a waits")]
        assert process.over
