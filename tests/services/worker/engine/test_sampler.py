"""Sampling: what each parameter means, and that a draw depends on (seed, position) alone."""

import math
from collections import Counter

import pytest
import torch

from services.worker.core.scheduling.sequence import is_penalised
from services.worker.engine.forward_batch import SamplingRow
from services.worker.engine.sampler import sample_rows
from services.worker.engine.token_counts import TokenCounts
from shared.messages.generation import SamplingParams


def row(output=(), prompt=(1,), eos=(0,), **params):
    values = {"max_tokens": 100, "seed": 7, "temperature": 0.0, **params}
    return row_of(SamplingParams(**values), prompt, output, tuple(eos))


def row_of(params, prompt, output=(), eos=()):
    counts = TokenCounts(prompt, output) if is_penalised(params) else None
    ends = () if params.ignore_eos else eos
    return SamplingRow(params, len(output), ends, len(output) < params.min_tokens, counts)


def sample(logits, *rows):
    return sample_rows(torch.tensor(logits, dtype=torch.float32).reshape(len(rows), -1), rows)


def one(logits, **kwargs):
    return sample(logits, row(**kwargs))[0].token_id


def test_greedy_takes_the_best_and_the_lowest_id_among_equals():
    assert [s.token_id for s in sample([[0, 3, 3, 1], [5, 0, 0, 0]], row(), row())] == [1, 0]


def test_min_tokens_masks_eos_and_stop_tokens_until_it_is_reached():
    logits = [9.0, 1.0, 8.0, 7.0]
    assert one(logits, min_tokens=2, stop_token_ids=(2,), output=(3,)) == 3
    assert one(logits, min_tokens=2, stop_token_ids=(2,), output=(3, 3)) == 0
    assert one(logits, min_tokens=2, ignore_eos=True) == 0


def test_logit_bias_moves_the_choice_and_bans():
    assert one([1.0, 2.0, 3.0], logit_bias=((0, 5.0),)) == 0
    assert one([1.0, 2.0, 3.0], logit_bias=((2, -100.0),)) == 1


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output():
    assert one([0.0, 3.0, 2.0], prompt=(1,), repetition_penalty=2.0) == 2
    assert one([0.0, 3.0, 2.0], prompt=(), output=(1,), repetition_penalty=2.0) == 2
    assert one([-1.0, -1.5, -3.0], prompt=(0,), repetition_penalty=2.0) == 1
    assert one([0.0, 3.0, 2.0], prompt=(2,), repetition_penalty=2.0) == 1


def test_frequency_and_presence_penalties_count_output_only():
    assert one([0.0, 3.0, 2.0], prompt=(1, 1, 1), frequency_penalty=2.0, presence_penalty=2.0) == 1
    assert one([0.0, 3.0, 2.0], output=(1, 1), frequency_penalty=0.6) == 2
    assert one([0.0, 3.0, 2.0], output=(1,), frequency_penalty=0.6) == 1
    assert one([0.0, 3.0, 2.0], output=(1, 1), presence_penalty=0.9) == 1
    assert one([0.0, 3.0, 2.0], output=(1,), presence_penalty=1.1) == 2


def draws(logits, count, **params):
    rows = [row(seed=seed, temperature=params.get("temperature", 1.0), **{k: v for k, v in params.items() if k != "temperature"}) for seed in range(count)]  # fmt: skip  # noqa: E501
    return Counter(s.token_id for s in sample([list(logits)] * count, *rows))


def test_draws_follow_the_softmax_at_the_temperature():
    logits = [math.log(0.6), math.log(0.3), math.log(0.1)]
    got = draws(logits, 4000)
    assert got[0] / 4000 == pytest.approx(0.6, abs=0.03)
    assert got[2] / 4000 == pytest.approx(0.1, abs=0.02)
    hot = draws(logits, 4000, temperature=2.0)
    roots = [math.sqrt(p) for p in (0.6, 0.3, 0.1)]
    assert hot[2] / 4000 == pytest.approx(roots[2] / sum(roots), abs=0.03)


def test_top_k_keeps_exactly_k_with_ties_by_id():
    assert set(draws([1.0, 2.0, 2.0, 2.0], 300, top_k=2)) == {1, 2}
    assert set(draws([1.0, 2.0, 3.0], 50, top_k=1)) == {2}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    assert set(draws(logits, 300, top_p=0.45)) == {0}
    assert set(draws(logits, 300, top_p=0.79)) == {0, 1}
    assert set(draws(logits, 300, top_p=0.85)) == {0, 1, 2}
    assert set(draws(logits, 300, top_p=0.0001)) == {0}


def test_top_p_applies_to_what_top_k_leaves():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert set(draws(logits, 400, top_k=2, top_p=0.55)) == {0}
    assert set(draws(logits, 400, top_k=2, top_p=0.60)) == {0, 1}


def test_a_draw_does_not_depend_on_the_batch():
    torch.manual_seed(0)
    logits = torch.randn(40, 3000) * 2
    kinds = [{}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 2000, "top_p": 0.99}, {"temperature": 0.0}]
    rows = [row(seed=i, output=tuple(range(i)), **{"temperature": 1.3, **kinds[i % 5]}) for i in range(40)]
    together = sample_rows(logits, rows)
    alone = [sample_rows(logits[i : i + 1], [rows[i]])[0] for i in range(40)]
    assert together == alone
    assert len({s.token_id for s in together}) > 30


def test_counts_get_each_token_that_is_sampled_and_equal_new_ones():
    torch.manual_seed(4)
    params = SamplingParams(max_tokens=100, seed=7, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4)
    prompt, output, kept = range(50), [], row_of(params, range(50)).counts
    for position in range(40):
        logits = torch.randn(1, 60)
        (anew,) = sample_rows(logits, [row_of(params, prompt, output)])
        for _ in range(1 + position % 2):  # again, as after a step that failed
            assert sample_rows(logits, [SamplingRow(params, position, counts=kept)]) == [anew]
        output.append(anew.token_id)


def test_penalties_ignore_ids_outside_of_the_vocabulary():
    assert one([0.0, 3.0, 2.0], prompt=(900,), output=(1, 1, 700), frequency_penalty=0.6) == 2


def test_log_probabilities_are_computed_for_the_rows_that_ask(monkeypatch):
    asked = []
    log_softmax = torch.log_softmax
    monkeypatch.setattr(torch, "log_softmax", lambda x, dim: asked.append(len(x)) or log_softmax(x, dim=dim))
    logits = [[1.0, 2.0, 3.0]] * 4
    got = sample(logits, row(), row(logprobs=1), row(temperature=1.0), row(logprobs=1))
    assert asked == [2]
    assert [s.logprobs is not None for s in got] == [False, True, False, True]


def test_logprobs_are_the_log_softmax_of_the_raw_logits():
    (got,) = sample([[1.0, 2.0, 3.0]], row(logprobs=2, logit_bias=((0, 50.0),), temperature=0.5))
    raw = torch.log_softmax(torch.tensor([1.0, 2.0, 3.0]), -1).tolist()
    assert got.token_id == 0
    assert got.logprobs.logprob == pytest.approx(raw[0])
    assert [t for t, _ in got.logprobs.top] == [2, 1]
    assert [v for _, v in got.logprobs.top] == pytest.approx([raw[2], raw[1]])
    (bare,) = sample([[1.0, 2.0, 3.0]], row(logprobs=0))
    assert bare.logprobs.top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_finite_logits_gets_an_error_and_the_others_their_tokens(bad):
    got = sample([[0.0, bad, 1.0], [0.0, 1.0, 2.0]], row(temperature=1.0), row())
    assert got[0].error.code == "internal"
    assert got[1].error is None
    assert got[1].token_id == 2


def test_a_bias_outside_the_vocabulary_is_a_bad_request_for_its_row_only():
    got = sample([[0.0, 1.0], [0.0, 1.0]], row(logit_bias=((2, 1.0),)), row(logprobs=1))
    assert got[0].error.code == "bad_request"
    assert got[1].token_id == 1


def test_the_given_logits_are_not_changed_and_half_precision_is_taken():
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    before = logits.clone()
    assert sample_rows(logits, [row(logit_bias=((0, 9.0),), repetition_penalty=2.0)])[0].token_id == 0
    assert torch.equal(logits, before)
