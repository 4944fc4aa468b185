from __future__ import annotations

import pytest

from services.gateway.core.failure_detector import FailureDetector, Reaction
from services.gateway.core.stream import Phase

DETECTOR = FailureDetector(stall_s=2.0, probe_s=1.0, queue_timeout_s=30.0)


@pytest.mark.parametrize(
    ("phase", "quiet_s", "asked", "reaction"),
    [
        (Phase.RUNNING, 1.9, False, Reaction.WAIT),
        (Phase.RUNNING, 2.0, False, Reaction.ASK),
        (Phase.RUNNING, 3.9, True, Reaction.WAIT),
        (Phase.RUNNING, 4.0, True, Reaction.GIVE_UP),
        (Phase.RUNNING, 4.0, False, Reaction.GIVE_UP),
        (Phase.SUBMITTED, 2.0, False, Reaction.ASK),
        (Phase.SUBMITTED, 29.9, True, Reaction.WAIT),
        (Phase.SUBMITTED, 30.0, True, Reaction.GIVE_UP),
    ],
)
def test_a_silent_stream_is_asked_for_once_and_given_up_later(
    phase: Phase, quiet_s: float, asked: bool, reaction: Reaction
) -> None:
    assert DETECTOR.stream_reaction(phase, quiet_s, asked=asked) is reaction


def test_a_worker_is_suspected_only_when_it_and_its_stream_are_silent() -> None:
    assert DETECTOR.suspects_worker(1.0, 1.0)
    assert not DETECTOR.suspects_worker(0.9, 5.0)
    assert not DETECTOR.suspects_worker(5.0, 0.9)


@pytest.mark.parametrize(
    ("missed", "quiet_s", "dead"), [(3, 3.0, True), (9, 3.0, True), (2, 9.0, False), (9, 2.9, False), (0, 9.0, False)]
)
def test_a_worker_is_dead_after_several_questions_and_no_sign_of_life(missed: int, quiet_s: float, dead: bool) -> None:
    assert DETECTOR.is_dead(missed, quiet_s) is dead


def test_silence_is_looked_at_several_times_per_probe_but_not_all_the_time() -> None:
    assert DETECTOR.check_every_s == 0.25
    assert FailureDetector(stall_s=1.0, probe_s=0.2, queue_timeout_s=1.0).check_every_s == pytest.approx(0.05)
