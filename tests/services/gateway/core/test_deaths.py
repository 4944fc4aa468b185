"""Who is poison: the rules, on the stories that they are made for."""

from __future__ import annotations

from services.gateway.core.failover import GiveUp, Outcome, Retry, WorkerLost, after_failure
from services.gateway.core.stream import CLEARED_TOKENS, MAX_OTHER_DEATHS, Deaths, StreamState
from shared.errors import PoisonRequest, Unavailable
from shared.messages.generation import SamplingParams, StreamPart
from tests.processes import process


class Story:
    """One request from attempt to attempt, each at another worker."""

    def __init__(self) -> None:
        sampling = SamplingParams(max_tokens=10_000, seed=0)
        self.stream = StreamState("r", "m", (1, 2, 3), sampling, 0.0)
        self.outcome: Outcome | None = None
        self.alone: list[bool] = []

    def attempt_dies(self, *, tokens: int = 0, in_own_step: bool = True) -> Story:
        """Its next attempt brings so many tokens, and its worker dies. One that is computed alone says where it is."""
        stream = self.stream
        stream.submitted_to(f"i{stream.attempt}", process(f"w{stream.attempt}"))
        self.alone.append(stream.deaths.suspected)
        for _ in range(tokens):
            self._part((7,))
        if stream.deaths.suspected:
            self._part((), computing=True)
            if not in_own_step:
                self._part((), computing=False)
        self.outcome = after_failure(
            stream, WorkerLost("gone", reason="gone"), max_attempts=5, model_registered=True, died=True
        )
        if isinstance(self.outcome, Retry):
            stream.requeued(fault=self.outcome.fault, avoid=True, deaths=self.outcome.deaths)
        return self

    def _part(self, token_ids: tuple[int, ...], *, computing: bool | None = None) -> None:
        stream = self.stream
        offset = len(stream.output_token_ids)
        stream.accept(
            StreamPart(request_id="r", attempt=stream.attempt, offset=offset, token_ids=token_ids, computing=computing)
        )

    @property
    def is_poison(self) -> bool:
        return isinstance(self.outcome, GiveUp) and isinstance(self.outcome.error, PoisonRequest)


def test_one_that_kills_with_its_prompt_is_ended_by_the_third_death() -> None:
    story = Story().attempt_dies().attempt_dies().attempt_dies()
    assert story.is_poison
    assert story.alone == [False, False, True]


def test_one_that_kills_at_a_place_of_its_text_is_ended_by_the_third_death() -> None:
    # What was said in the last steps before a death may be lost with the worker.
    story = Story().attempt_dies(tokens=500).attempt_dies(tokens=2).attempt_dies(tokens=3)
    assert story.is_poison
    assert story.alone == [False, False, True]


def test_deaths_spend_no_attempt() -> None:
    story = Story()
    for _ in range(12):
        story.attempt_dies(tokens=100)
        assert story.outcome == Retry(fault=False, pause_s=1.0, deaths=story.stream.deaths)
    assert story.stream.failures == 0
    assert not any(story.alone), "a request that gets on is no suspect, however many workers die"


def test_one_that_dies_while_others_are_computed_is_not_ended() -> None:
    story = Story().attempt_dies().attempt_dies()
    for _ in range(MAX_OTHER_DEATHS):
        story.attempt_dies(in_own_step=False)
        assert isinstance(story.outcome, Retry)
    assert all(story.alone[2:])
    assert story.stream.deaths.counted == 2


def test_workers_that_die_one_after_another_are_not_used_up_for_ever() -> None:
    story = Story().attempt_dies().attempt_dies()
    for _ in range(MAX_OTHER_DEATHS + 1):
        story.attempt_dies(in_own_step=False)
    assert isinstance(story.outcome, GiveUp)
    assert isinstance(story.outcome.error, Unavailable)
    assert not story.is_poison


def test_a_suspect_that_gets_past_the_place_is_cleared() -> None:
    story = Story().attempt_dies(tokens=3).attempt_dies().attempt_dies(tokens=CLEARED_TOKENS + 1)
    assert isinstance(story.outcome, Retry)
    assert story.stream.deaths == Deaths(1, 0, ("w2",))
    story.attempt_dies(tokens=100).attempt_dies(tokens=100)
    assert story.alone == [False, False, True, False, False]


def test_a_suspect_asks_to_be_computed_alone_until_it_is_cleared() -> None:
    story = Story().attempt_dies()
    assert story.stream.alone_tokens == 0
    story.attempt_dies()
    assert story.stream.alone_tokens > CLEARED_TOKENS, "once it is computed with others, its death starts a new series"


def test_what_a_worker_said_of_an_earlier_attempt_does_not_count() -> None:
    story = Story().attempt_dies().attempt_dies().attempt_dies(in_own_step=False)
    stream = story.stream
    stream.submitted_to("i", process("w"))
    stream.accept(StreamPart(request_id="r", attempt=stream.attempt - 1, offset=0, computing=True))
    assert not stream.computing
