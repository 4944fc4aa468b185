"""A link to another worker: what is asked again, with which pauses, and when it ends. How it judges silence is tested
where it is used (``live/test_link_to_target.py``)."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from services.worker.core.pauses import growing
from services.worker.link import GONE_S, LinkLost, WorkerLink
from shared.errors import BlitzError, Conflict, DeadlineExceeded, NoResponder, NotFound, Overloaded, Unavailable
from shared.messages.common import Ack
from shared.messages.live import Seal
from tests.shared.bus.memory import MemoryBroker, MemoryBus

SEAL = Seal(pair_id="pair", count=3)


class Ends:
    """A bus where "other" answers ``SEAL`` with each of ``answers``, and then well."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus: MemoryBus = self.broker.bus("me")
        self.answers: list[BlitzError] = []
        self.num_asked = 0

    async def link(self, silence_s: float = 1e6) -> WorkerLink:
        await self.broker.bus("other").respond("subject", Seal, self._answer)
        return WorkerLink(self.bus, "the other", silence_s=silence_s)

    async def _answer(self, _: Seal) -> Ack:
        self.num_asked += 1
        if self.answers:
            raise self.answers.pop(0)
        return Ack()


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.mark.parametrize("error", [Unavailable("busy"), DeadlineExceeded("late"), NotFound("not yet")])
async def test_it_asks_again_until_there_is_an_answer(ends: Ends, error: BlitzError) -> None:
    ends.answers = [error] * 3
    link = await ends.link()
    assert await link.ask("subject", SEAL, Ack, not_now=(NotFound,), pauses=itertools.repeat(0.0)) == Ack()
    assert ends.num_asked == 4


@pytest.mark.parametrize("error", [Conflict("no"), Overloaded("full"), NotFound("nothing")])
async def test_a_refusal_reaches_the_caller_at_once(ends: Ends, error: BlitzError) -> None:
    ends.answers = [error]
    with pytest.raises(type(error)):
        await (await ends.link()).ask("subject", SEAL, Ack)
    assert ends.num_asked == 1


async def test_it_asks_no_more_once_there_is_a_reason_to_stop(ends: Ends) -> None:
    ends.answers = [Unavailable("busy")] * 1000
    link = await ends.link()
    with pytest.raises(LinkLost, match="enough"):
        await link.ask(
            "subject",
            SEAL,
            Ack,
            pauses=itertools.repeat(0.0),
            why_stop=lambda: "enough" if ends.num_asked == 3 else "",
        )
    assert ends.num_asked == 3


async def test_pauses_are_slept_in_order(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    link = await ends.link()
    ends.answers = [Unavailable("busy")] * 4
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await link.ask("subject", SEAL, Ack, pauses=growing(0.2, 0.5))
    assert [s for s in slept if s] == pytest.approx([0.2, 0.3, 0.45, 0.5])


async def test_time_in_which_our_own_bus_is_away_is_not_the_others_silence(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, now_s = await ends.link(silence_s=5.0), time.monotonic()
    with monkeypatch.context() as clock:
        clock.setattr(time, "monotonic", lambda: now_s + 100.0)
        with pytest.raises(LinkLost, match="was silent for 5 s"):
            link.check(DeadlineExceeded("late"), now_s)
        link.check(DeadlineExceeded("late"), now_s + 96.0)
        with pytest.raises(LinkLost, match="nobody answers for the other"):
            link.check(NoResponder("gone"), now_s + 100.0 - 1.1 * GONE_S)
        ends.bus.go_down()
        link.check(NoResponder("gone"), now_s)
        assert link.silent_s(now_s) is None
