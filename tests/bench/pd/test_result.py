"""The figures of ``bench pd``, from answers."""

from __future__ import annotations

import pytest

from bench.pd.result import Alone, Disaggregated, Loaded, Mutation, Result
from bench.streamed import Streamed


def answer(number: int, *tokens_s: float, text: str = "x", error: str = "") -> Streamed:
    return Streamed(number, text, tokens_s, error)


def alone(second_s: float) -> Alone:
    return Alone((answer(0, 1.0, 1.0 + second_s, 9.0),), num_tokens=1000)


def result(loaded: Loaded, *, colocated: Loaded | None = None) -> Result:
    point = Disaggregated(goodput_gbps=0.008, kv_bytes=100_000, alone=alone(0.045), loaded=loaded)
    return Result(4, alone(0.025), colocated or loaded, (point,), (Mutation("decode", 30.0), Mutation("decode", 50.0)))


def test_what_the_second_token_waits_for_is_the_kv_that_was_not_hidden() -> None:
    point = result(Loaded(())).sweep[0]
    assert point.transfer_s == pytest.approx(0.1)
    assert point.kv_share() == pytest.approx(0.1)
    assert point.delay_s(alone(0.025)) == pytest.approx(0.02)
    assert point.hidden_share(alone(0.025)) == pytest.approx(0.8)


def test_figures_are_over_all_requests_and_all_gaps() -> None:
    loaded = Loaded((answer(0, 0.1, 0.2, 0.3), answer(1, 0.3, 0.6), answer(2, error="503: no instance")))
    document = loaded.document()
    assert (document["requests"], document["failed"], document["errors"]) == (3, 1, ["503: no instance"])
    assert document["ttft_mean_s"] == pytest.approx(0.2)
    assert document["tbt_max_s"] == pytest.approx(0.3)
    assert document["tbt_mean_s"] == pytest.approx(0.5 / 3, abs=1e-4)


def test_the_document_has_both_ways_and_the_named_proportion() -> None:
    document = result(Loaded((answer(0, 0.1, 0.2),))).document()
    modes = document["modes"]
    assert isinstance(modes, dict)
    for mode in ("colocated", "disaggregated"):
        assert {"ttft_mean_s", "ttft_p99_s", "tbt_mean_s", "tbt_p99_s"} <= set(modes[mode])
    assert document["kv_hidden_share"] == 0.8
    assert document["mutation_ms"] == 40.0
    assert document["tokens_identical"] is True


def test_another_text_of_one_request_is_seen_and_a_failed_one_is_counted() -> None:
    right, wrong = Loaded((answer(0, 0.1), answer(1, 0.1))), Loaded((answer(0, 0.1), answer(1, 0.1, text="y")))
    assert not result(right, colocated=wrong).tokens_identical()
    failed = Loaded((answer(0, 0.1), answer(1, text="", error="gone")))
    assert result(right, colocated=failed).tokens_identical()
    assert result(right, colocated=failed).failed == 1
