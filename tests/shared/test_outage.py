"""What is away is said once."""

from __future__ import annotations

import logging

import pytest

from shared.outage import AGAIN_EVERY_S, Outage

log = logging.getLogger("tests.outage")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=log.name)
    return caplog


def test_only_the_first_of_many_failures_is_said_and_so_is_the_end(said: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    outage = Outage(log, "the pool is there again", clock=lambda: now_s)
    for _ in range(10):
        outage.failed("the pool is away: %s", "nobody listens")
        now_s += 0.25
    outage.worked()
    outage.worked()
    assert said.messages == ["the pool is away: nobody listens", "the pool is there again, after 2.5 s"]
    assert [record.levelno for record in said.records] == [logging.WARNING, logging.INFO]


def test_a_long_outage_is_said_again_and_a_new_one_at_once(said: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    outage = Outage(log, "back", clock=lambda: now_s)
    outage.failed("away")
    now_s += AGAIN_EVERY_S
    outage.failed("away")
    outage.failed("away")
    outage.worked()
    outage.failed("away")
    assert said.messages == ["away", "away", f"back, after {AGAIN_EVERY_S:.1f} s", "away"]


def test_nothing_is_said_of_what_always_works(said: pytest.LogCaptureFixture) -> None:
    Outage(log, "back").worked()
    assert said.messages == []
