"""Draws: their distribution, what top-k and top-p keep against the plain definition, and that rows are alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.worker.engine import categorical as module
from services.worker.engine.categorical import BLOCK_TOKENS, DrawRow, draw, uniform, uniforms

LAST = 1 - 2.0**-53
"""The largest number that ``uniform`` gives."""


def draw_rows(scores: torch.Tensor, rows: list[DrawRow]) -> list[int]:
    return draw(scores, scores.amax(-1).numpy(), rows)


def by_definition(scores: torch.Tensor, row: DrawRow) -> int:
    """In float64, with everything sorted."""
    values = scores.double().numpy()
    order = np.lexsort((np.arange(len(values)), -values))
    weights = np.exp((values[order] - values.max()) / row.temperature)
    kept = row.top_k if 0 < row.top_k < len(values) else len(values)
    sums = weights.cumsum()
    if row.top_p < 1:
        kept = min(kept, int((sums < row.top_p * sums[kept - 1]).sum()) + 1)
    return int(order[min(int(np.searchsorted(sums, row.number * sums[kept - 1], side="right")), kept - 1)])


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """In standard deviations of what a right sampler gives; cells of under five are taken together."""
    common = expected >= 5
    seen = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    return float((((seen - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom))


KINDS = {
    "all": DrawRow(0, 1.0),
    "cold": DrawRow(0, 0.6),
    "top-p": DrawRow(0, 1.0, top_p=0.9),
    "top-k": DrawRow(0, 1.3, top_k=40),
    "both": DrawRow(0, 1.0, top_k=300, top_p=0.8),
}


@pytest.mark.parametrize("vocab", [300, 2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS + 7])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_distribution_that_is_asked_for(kind: str, vocab: int) -> None:
    """Each token has an interval of numbers that is as long as it is likely: of evenly spaced numbers it gets its
    share, but for the two at the ends."""
    torch.manual_seed(vocab)
    scores, how, count = torch.randn(vocab) * 1.5, KINDS[kind], 4000
    rows = [DrawRow((i + 0.5) / count, how.temperature, how.top_k, how.top_p) for i in range(count)]
    tokens: list[int] = []
    for start in range(0, count, 500):
        tokens += draw_rows(scores.expand(500, -1).contiguous(), rows[start : start + 500])
    probabilities = torch.softmax(scores.double() / how.temperature, 0).numpy()
    order = np.argsort(-probabilities)
    if how.top_k:
        probabilities[order[how.top_k :]] = 0
    if how.top_p < 1:
        sums = probabilities[order].cumsum()
        probabilities[order[int((sums < how.top_p * sums[-1]).sum()) + 1 :]] = 0
    expected = probabilities / probabilities.sum() * count
    counts = np.bincount(tokens, minlength=vocab)
    assert counts[probabilities == 0].sum() == 0
    assert np.abs(counts - expected).max() < 1.01


def test_numbers_are_spread_evenly() -> None:
    """With the last test: draws by seed have that distribution."""
    for numbers in ([uniform(seed, 3) for seed in range(20_000)], [uniform(7, position) for position in range(20_000)]):
        assert (
            -4 < chi_square(np.bincount((np.array(numbers) * 400).astype(int), minlength=400), np.full(400, 50.0)) < 4
        )


def test_numbers_of_many_rows_are_those_of_each() -> None:
    pairs = [(seed, at) for seed in (0, 1, -1, 7, 2**63 - 1, -(2**63)) for at in (0, 1, 2**31, 10**12)]
    assert uniforms(*zip(*pairs, strict=True)).tolist() == [uniform(*pair) for pair in pairs]


@pytest.mark.parametrize("sort_tokens", [module.SORT_TOKENS, 50], ids=["sorted", "in buckets"])
@pytest.mark.parametrize("shape", ["peaked", "flat", "ties", "equal", "banned"])
def test_top_k_and_top_p_keep_and_draw_what_their_definition_says(
    monkeypatch: pytest.MonkeyPatch, sort_tokens: int, shape: str
) -> None:
    monkeypatch.setattr(module, "SORT_TOKENS", sort_tokens)
    torch.manual_seed(5)
    scores = torch.randn(80, 6000)
    if shape == "peaked":
        scores = scores * 4
    elif shape == "ties":
        scores = (scores * 3).round() * -1.0  # zeros of both signs
    elif shape == "equal":
        scores = torch.zeros_like(scores)
    elif shape == "banned":
        scores[torch.rand_like(scores) < 0.5] = -torch.inf
    kinds = [(0, 0.95), (50, 1.0), (5000, 1.0), (3000, 0.7), (0, 0.0001), (0, 0.9999), (1, 0.5), (5999, 0.999)]
    rows = [
        DrawRow((0.0, 0.999)[i % 2] if i < 16 else uniform(i, 2), 0.3 + i / 40, *kinds[(i // 2) % len(kinds)])
        for i in range(80)
    ]
    expected = [by_definition(line, row) for line, row in zip(scores, rows, strict=True)]
    assert draw_rows(scores, rows) == expected


@pytest.mark.parametrize("vocab", [BLOCK_TOKENS - 1, 40_000])
def test_a_row_alone_draws_what_it_draws_in_a_batch(vocab: int) -> None:
    torch.manual_seed(2)
    scores = torch.randn(70, vocab) * 2
    kinds = [(0, 1.0), (0, 1.0), (40, 1.0), (0, 0.9)]
    rows = [DrawRow(uniform(i, 0), 0.5 + i / 50, *kinds[i % 4]) for i in range(70)]
    together = draw_rows(scores, rows)
    assert [draw_rows(scores[i : i + 1], rows[i : i + 1])[0] for i in range(70)] == together
    backwards = draw_rows(scores.flip(0).contiguous(), rows[::-1])
    assert backwards[::-1] == together


@pytest.mark.parametrize("threads", [1, 2])
def test_the_sums_that_a_draw_is_looked_up_in_are_bit_for_bit_those_of_the_row_alone(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(3)
        scores, ones = torch.randn(9, 33_000), torch.full((9,), 0.7)
        best = scores.amax(-1)
        together = module.draw_weights(scores, best, ones)
        for i in range(9):
            alone = module.draw_weights(scores[i : i + 1], best[i : i + 1], ones[:1])
            assert torch.equal(alone[0], together[i])
            assert torch.equal(alone.sum(-1)[0], together.sum(-1)[i])
    finally:
        torch.set_num_threads(before)


def test_a_token_without_weight_is_never_drawn() -> None:
    for vocab in (4, 3 * BLOCK_TOKENS):
        scores = torch.full((1, vocab), -torch.inf)
        scores[0, [1, vocab - 2]] = 0.0
        for how in ({}, {"top_p": 0.999}, {"top_k": vocab - 1}):
            assert draw_rows(scores, [DrawRow(0.0, 1.0, **how)]) == [1]
            assert draw_rows(scores, [DrawRow(LAST, 1.0, **how)]) == [vocab - 2]


def test_a_draw_without_top_k_and_top_p_is_the_inverse_of_the_cumulative_sum_by_id() -> None:
    torch.manual_seed(8)
    scores = torch.randn(1, 5000) * 2
    sums = torch.softmax(scores[0].double(), 0).cumsum(0)
    for number in (0.0, 0.1234, 0.5, 0.77, 0.999, LAST):
        assert draw_rows(scores, [DrawRow(number, 1.0)]) == [int(torch.searchsorted(sums, number, right=True))]


@pytest.mark.parametrize("temperature", [1e-4, 1e-38, 1e-300])
def test_hardly_any_temperature_is_greedy(temperature: float) -> None:
    scores = torch.tensor([[0.0, 3.0, 2.5, -1.0] * 2000])
    for how in ({"top_k": 1}, {"top_p": 0.00001}):
        assert draw_rows(scores, [DrawRow(LAST, temperature, **how)]) == [1]
    assert draw_rows(scores[:, :4].contiguous(), [DrawRow(LAST, temperature)]) == [1]


def test_draws_of_the_whole_vocabulary_sort_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("sorted")

    torch.manual_seed(1)
    for name in ("sort", "argsort", "topk"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
        monkeypatch.setattr(torch, name, refuse)
    monkeypatch.setattr(module, "np", None)  # in which order tokens fall is found with it
    assert len(draw_rows(torch.randn(3, 9000), [DrawRow(0.3, 1.0)] * 3)) == 3


def test_numbers_are_keyed_by_seed_and_position() -> None:
    assert uniform(3, 5) == uniform(3, 5)
    assert len({uniform(seed, position) for seed in range(40) for position in range(40)}) == 1600
    assert 0 <= uniform(-(2**63), 0) < 1
    assert 0 <= uniform(2**64 - 1, 10**9) < 1
    values = [uniform(11, position) for position in range(2000)]
    assert sum(values) / 2000 == pytest.approx(0.5, abs=0.03)
