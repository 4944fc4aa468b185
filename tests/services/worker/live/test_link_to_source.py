"""The target's line to the source: what is said until it is heard, and when the source is given up."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import pytest

from services.worker.core.live.life import PairLife
from services.worker.live.links import LinkToSource
from services.worker.live.tensors import PairTensors
from shared import subjects
from shared.errors import Internal
from shared.messages.common import Ack
from shared.messages.live import PairEnded, Taken
from tests.processes import process
from tests.services.worker.live.members import assignment
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import eventually

NEVER_S = 1e6


class Ends:
    """A line at w1, and w0, which may hear it."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.source = self.broker.bus("w0")
        self.target = self.broker.bus("w1")
        self.tensors = SimpleNamespace(peer_is_lost=False)
        self.life = PairLife()
        self.heard: list[object] = []
        self.deaf = 0
        """So many of the next questions are answered with an error."""

    def line(self, silence_s: float = NEVER_S) -> LinkToSource:
        return LinkToSource(assignment(), self.target, cast(PairTensors, self.tensors), self.life, silence_s=silence_s)

    async def respond(self) -> None:
        await self.source.respond(subjects.worker_live(process("w0"), "taken"), Taken, self._answer)

    async def _answer(self, message: Taken) -> Ack:
        self.heard.append(message)
        if self.deaf:
            self.deaf -= 1
            raise Internal("not now")
        return Ack()


@pytest.fixture
async def ends() -> Ends:
    return Ends()


async def test_what_is_taken_is_told_until_it_is_heard(ends: Ends) -> None:
    await ends.respond()
    ends.deaf = 2
    await ends.line().tell_taken("b1", "b2", loaded=True)
    assert ends.heard == [Taken(pair_id="pair", batch_ids=("b1", "b2"), loaded=True)] * 3


async def test_nothing_is_told_of_a_pair_that_has_ended(ends: Ends) -> None:
    telling = asyncio.create_task(ends.line().tell_taken("b1", loaded=False))
    await asyncio.sleep(0.02)
    assert not telling.done(), "nobody has heard it"
    ends.life.fail()
    await asyncio.wait_for(telling, 10)


async def test_a_source_that_says_nothing_is_lost_until_it_says_something(ends: Ends) -> None:
    line = ends.line(silence_s=0.2)
    assert line.why_lost() == ""
    await eventually(lambda: line.why_lost() == "the source was silent for 0.2 s")
    line.heard()
    assert line.why_lost() == ""


async def test_an_outage_of_our_own_bus_is_not_the_sources_silence(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ends.line(silence_s=5.0)
    began_s = time.monotonic()
    with monkeypatch.context() as clock:
        ends.target.go_down()
        clock.setattr(time, "monotonic", lambda: began_s + 100.0)
        assert line.why_lost() == ""
        ends.target.go_up()
        clock.setattr(time, "monotonic", lambda: began_s + 104.0)
        assert line.why_lost() == "", "the source may be silent for 5 s from now on"
        clock.setattr(time, "monotonic", lambda: began_s + 106.0)
        assert line.why_lost() == "the source was silent for 5 s"


async def test_a_cut_connection_needs_no_silence(ends: Ends) -> None:
    line = ends.line()
    assert line.why_lost() == ""
    ends.tensors.peer_is_lost = True
    assert line.why_lost() == "the connection to the source is lost"


async def test_the_end_is_told_if_it_can_be(ends: Ends) -> None:
    await ends.source.subscribe(subjects.worker_pair_ended(process("w0")), PairEnded, ends.heard.append)
    line = ends.line()
    await line.tell_ended("why", ("b1",))
    await eventually(lambda: ends.heard == [PairEnded(pair_id="pair", reason="why", finished=("b1",))])
    await ends.target.close()
    await line.tell_ended("again", ())
