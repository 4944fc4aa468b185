from __future__ import annotations

from typing import Any

import pytest

from bench.openai_events import PromptTokensDetails, Usage
from bench.prefix.load import Answered
from bench.prefix.result import Run, aims, imbalance, rows
from bench.prefix.workload import Planned
from bench.streamed import Streamed


def answered(
    at_s: float, ttft_s: float | None, *, prompt: int = 100, cached: int = 0, error: str = "", late: bool = False
) -> Answered:
    usage = None if error else Usage(prompt, 16, PromptTokensDetails(cached))
    tokens_s = () if ttft_s is None else (ttft_s,)
    return Answered(Planned(0, at_s, (1,), 16), Streamed(0, "a", tokens_s, error, usage=usage), late)


def run(
    system: str = "none",
    seed: int = 0,
    *answers: Answered,
    workload: str = "turns",
    computed: dict[str, int] | None = None,
    warm_s: float = 0.0,
) -> Run:
    tokens = {"a": 100, "b": 100, "c": 100} if computed is None else computed
    return Run(workload, system, seed, warm_s, answers, tokens, frozenset("abc"), 1.0)


def row_of(found: list[dict[str, object]], system: str) -> dict[str, Any]:
    (row,) = [row for row in found if row["system"] == system]
    return row


def test_what_is_warm_up_is_in_no_figure_but_its_failures() -> None:
    answers = (
        answered(0.5, 9.0, prompt=1000),
        answered(0.6, None, error="503: full"),
        answered(1.0, 0.2, cached=60),
        answered(2.0, 0.4, cached=40, late=True),
    )
    document = run("cache", 0, *answers, warm_s=1.0).document()
    assert (document["requests"], document["measured"], document["failed"]) == (4, 2, 1)
    assert document["errors"] == ["503: full"]
    assert (document["hit_rate"], document["ttft_mean_s"], document["late_turns"]) == (0.5, 0.3, 1)


def test_who_failed_before_a_token_has_no_ttft_and_is_counted() -> None:
    document = run("cache", 0, answered(1.0, None, error="timeout")).document()
    assert (document["measured"], document["failed"]) == (1, 1)
    assert (document["ttft_mean_s"], document["ttft_p99_s"], document["hit_rate"]) == (None, None, None)
    (row,) = rows([run("none", 0, answered(1.0, None, error="timeout"))])
    assert (row["failed"], row["ttft_mean_s"], row["ttft_mean_s_of_none"]) == (1, None, None)


def test_only_instances_that_were_there_all_the_time_count_for_the_imbalance() -> None:
    document = run(computed={"a": 300, "b": 200, "c": 100, "late": 900}).document()
    assert (document["imbalance"], document["computed_tokens"]) == (1.5, 1500)
    assert run(computed={"late": 900}).document()["imbalance"] is None
    assert run(computed={"a": 300}).document()["imbalance"] == 3.0
    assert imbalance([7, 7, 7]) == 1.0


def test_a_ratio_is_to_the_same_seed() -> None:
    runs = [
        run("none", 0, answered(1, 1.0), computed={"a": 100}),
        run("cache", 0, answered(1, 0.5), computed={"a": 50}),
        run("cache", 1, answered(1, 1.0), computed={"a": 40}),
        run("none", 1, answered(1, 10.0), computed={"a": 200}),
        run("none", 2, answered(1, 4.0), computed={"a": 100}),
        run("cache", 2, answered(1, 3.0), computed={"a": 80}),
    ]
    found = rows(runs)
    row = row_of(found, "cache")
    assert (row["seeds"], row["ttft_mean_s"], row["requests"]) == (3, 1.0, 3)
    # 0.5, 0.1 and 0.75: the ratio of the medians would be 0.25.
    assert (row["ttft_mean_s_of_none"], row["ttft_mean_s_of_none_range"]) == (0.5, [0.1, 0.75])
    assert row["computed_tokens_of_none"] == 0.5
    assert row_of(found, "none")["ttft_p99_s_of_none"] == 1.0


def test_requests_of_all_seeds_are_summarised_together_whatever_run_they_are_of() -> None:
    runs = [
        run("none", 0, answered(1, 1.0), answered(1, 1.0), answered(1, 1.0)),
        run("none", 1, answered(1, 5.0), answered(1, None, error="timeout")),
        run("cache", 0, answered(1, 0.5)),
        run("cache", 1, answered(1, 0.7)),
        run("cache", 1, answered(1, 9.0), workload="system"),
    ]
    found = rows(runs)
    none, cache, alone = found
    assert (none["ttft_mean_all_s"], cache["ttft_mean_all_s"]) == (2.0, 0.6)
    assert none["ttft_p99_all_s"] == pytest.approx(4.88)
    assert (none["ttft_mean_all_s_of_none"], cache["ttft_mean_all_s_of_none"]) == (1.0, 0.3)
    assert cache["ttft_p99_all_s_of_none"] == pytest.approx(0.698 / 4.88, abs=0.001)
    assert (alone["ttft_mean_all_s"], alone["ttft_mean_all_s_of_none"]) == (9.0, None)


def test_workloads_are_not_mixed() -> None:
    found = rows([run("none", 0, answered(1, 1.0)), run("none", 0, answered(1, 2.0), workload="system")])
    assert [(row["workload"], row["ttft_mean_s"]) for row in found] == [("turns", 1.0), ("system", 2.0)]


@pytest.mark.parametrize(("ttft_s", "met"), [(0.5, True), (0.6, False)])
def test_aims_are_those_of_the_workload(ttft_s: float, met: bool) -> None:
    runs = [
        run("none", 0, answered(1, 1.0)),
        run("affinity", 0, answered(1, ttft_s)),
        run("none", 0, answered(1, 1.0), workload="none"),
        run("affinity", 0, answered(1, 1.03), workload="none", computed={"a": 2, "b": 1, "c": 1}),
    ]
    found = {(aim["workload"], aim["figure"]): aim for aim in aims(rows(runs), "affinity")}
    assert found["turns", "ttft_mean_s_of_none"]["met"] is met
    assert found["turns", "ttft_p99_s_of_none"]["met"]
    assert found["turns", "imbalance"]["met"]
    assert found["none", "ttft_mean_s_of_none"] == {
        "workload": "none",
        "figure": "ttft_mean_s_of_none",
        "aim": 1.02,
        "value": 1.03,
        "met": False,
    }
    assert found["none", "imbalance"]["met"] is False
    assert ("none", "ttft_p99_s_of_none") not in found


def test_what_was_not_measured_meets_no_aim() -> None:
    (aim, *_) = aims(rows([run("affinity", 0, answered(1, 1.0))]), "affinity")
    assert (aim["value"], aim["met"]) == (None, None)
    assert aims(rows([run("none", 0, answered(1, 1.0))]), "affinity") == []
