from __future__ import annotations

from bench.fleet.judge import Answer
from bench.turns import Result, Setting


def test_each_request_wants_another_model_than_the_one_before() -> None:
    arrivals = Setting(models=3, requests=7).arrivals()
    assert [arrival.model[-1] for arrival in arrivals] == list("0120120")
    assert len({arrival.prompt for arrival in arrivals}) == 7


def test_what_failed_is_counted_and_its_first_token_too_if_it_came() -> None:
    answers = (Answer(0, 0.1, "a"), Answer(1, 0.3, "b", "503: full"), Answer(2, None, "", "503: full"))
    document = Result(Setting(3, 3), 1.234, answers).document()
    assert (document["failed"], document["errors"]) == (2, ["503: full"])
    assert (document["ttft_p50_s"], document["total_s"]) == (0.2, 1.23)
