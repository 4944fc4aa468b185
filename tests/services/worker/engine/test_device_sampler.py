"""A sampler that never looks at what the device has: against ``HostSampler``, and that nothing in it would wait."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import is_penalised
from services.worker.device.tensors import Array, HostTensors
from services.worker.engine.categorical import uniform
from services.worker.engine.device_draw import BLOCK_TOKENS, ROWS_AT_ONCE
from services.worker.engine.device_sampler import DeviceSampler
from services.worker.engine.forward_batch import ForwardBatch, RowOf, SamplingRow, Slice
from services.worker.engine.sampler import HostSampler
from services.worker.engine.sampling import Sampler
from shared.errors import BadRequest
from shared.messages.generation import SamplingParams

NEAR = 1e-6
"""Of the mass: nearer to a boundary, the rounding of weights may decide."""


def params_of(**params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "seed": 7, "temperature": 0.0, **params})


def row(position: int = 0, ends: tuple[int, ...] = (), counts: Any = None, **params: Any) -> SamplingRow:
    made = params_of(**params)
    return SamplingRow(made, position, ends, position < made.min_tokens, counts)


def batch_of(rows: Sequence[SamplingRow], number: int = 0) -> ForwardBatch:
    return ForwardBatch(number, tuple(Slice(i, (0,), 0, (0,), one) for i, one in enumerate(rows)))


def sampled(sampler: Sampler, logits: torch.Tensor, rows: Sequence[SamplingRow], number: int = 0) -> list[Sampled]:
    return sampler.sample(logits.clone(), batch_of(rows, number))()


def of_both(logits: torch.Tensor, *rows: SamplingRow) -> tuple[list[Sampled], list[Sampled]]:
    vocab = logits.shape[1]
    host, device = (sampled(one(vocab, HostTensors()), logits, rows) for one in (HostSampler, DeviceSampler))
    return host, device


class Request:
    """What two samplers are told of one: each has counts of its own."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], ends: tuple[int, ...]):
        self.params, self.prompt, self.output, self.ends = params, list(prompt), list(output), ends
        self.counts: dict[int, Any] = {}

    def row(self, sampler: Sampler, position: int) -> SamplingRow:
        if is_penalised(self.params) and id(sampler) not in self.counts:
            self.counts[id(sampler)] = sampler.counts_of(self.prompt, self.output)
        counts = self.counts.get(id(sampler))
        return SamplingRow(self.params, position, self.ends, position < self.params.min_tokens, counts)

    def adjusted(self, logits: Array) -> Array:
        """By definition, of float32."""
        params, scores = self.params, logits.copy()
        if len(self.output) < params.min_tokens:
            scores[[*self.ends, *params.stop_token_ids]] = -np.inf
        for token_id, bias in dict(params.logit_bias).items():
            scores[token_id] += np.float32(bias)
        for token_id in {*self.prompt, *self.output}:
            if params.repetition_penalty != 1.0:
                penalty, value = np.float32(params.repetition_penalty), scores[token_id]
                scores[token_id] = value / penalty if value > 0 else value * penalty
            times = np.float32(self.output.count(token_id))
            scores[token_id] -= np.float32(params.frequency_penalty) * times + np.float32(
                params.presence_penalty
            ) * np.float32(times > 0)
        return scores


def possible(scores: Array, params: SamplingParams, number: float) -> set[int]:
    """The tokens that a draw may give, in float64: one, but where the number is so near to a boundary."""
    values = scores.astype(np.float64)
    if params.temperature == 0.0:
        return {int(values.argmax())}
    vocab = len(values)
    everything = params.top_p >= 1.0 and not 0 < params.top_k < vocab
    order = np.arange(vocab) if everything else np.lexsort((np.arange(vocab), -values))
    weights = np.exp((values[order] - values.max()) / params.temperature)
    if 0 < params.top_k < vocab:
        weights = weights[: params.top_k]
    sums = weights.cumsum()
    near = NEAR * sums[-1]
    ends = [len(sums) - 1]
    if params.top_p < 1.0:
        wanted = params.top_p * sums[-1]
        ends = list(range(int((sums < wanted - near).sum()), min(int((sums < wanted + near).sum()), len(sums) - 1) + 1))
    found: set[int] = set()
    for end in ends:
        wanted = number * sums[end]
        first = int(np.searchsorted(sums, max(0.0, wanted - near), side="right"))
        last = int(np.searchsorted(sums, wanted + near, side="right"))
        found |= {int(order[at]) for at in range(first, min(last, end) + 1) if weights[at] > 0}
    return found


def drawn_request(chance: random.Random, vocab: int) -> Request:
    def maybe(value: Any, default: Any) -> Any:
        return value if chance.random() < 0.4 else default

    ids = range(vocab)
    params = params_of(
        seed=chance.getrandbits(63),
        temperature=chance.choice([0.0, 0.2, 0.7, 1.0, 1.0, 1.5, 1e-38]),
        top_k=maybe(chance.choice([1, 2, 40, 1000, 1500, vocab - 1, vocab, 2 * vocab]), 0),
        top_p=maybe(chance.choice([0.0001, 0.5, 0.9, 0.95, 0.999]), 1.0),
        frequency_penalty=maybe(chance.uniform(-1, 1), 0.0),
        presence_penalty=maybe(chance.uniform(-1, 1), 0.0),
        repetition_penalty=maybe(chance.uniform(0.5, 2), 1.0),
        logit_bias=maybe(tuple((i, chance.uniform(-100, 5)) for i in chance.choices(ids, k=3)), ()),
        min_tokens=maybe(5, 0),
        stop_token_ids=maybe(tuple(chance.choices(ids, k=2)), ()),
    )
    prompt, output = chance.choices(ids, k=chance.randrange(30)), chance.choices(ids, k=chance.randrange(9))
    return Request(params, prompt, output, (chance.randrange(vocab),))


def drawn_logits(chance: random.Random, num_rows: int, vocab: int) -> torch.Tensor:
    maker = torch.Generator().manual_seed(chance.getrandbits(40))
    logits = torch.randn(num_rows, vocab, generator=maker) * 3
    for line in logits:
        shape = chance.choice(["plain", "plain", "ties", "banned", "peaked", "equal"])
        if shape == "ties":
            line.copy_((line * 2).round() * -1.0)  # zeros of both signs
        elif shape == "banned":
            line[torch.rand(vocab, generator=maker) < 0.5] = -torch.inf
            line[chance.randrange(vocab)] = 1.0
        elif shape == "peaked":
            line *= 5
        elif shape == "equal":
            line.fill_(2.5)
    return logits


@pytest.mark.parametrize(
    ("vocab", "num_rows"), [(100, 400), (BLOCK_TOKENS, 100), (3 * BLOCK_TOKENS + 7, 200), (128_256, 40)]
)
def test_it_samples_what_the_host_samples_but_for_numbers_at_a_boundary(vocab: int, num_rows: int) -> None:
    chance = random.Random(vocab)
    requests = [drawn_request(chance, vocab) for _ in range(num_rows)]
    logits = drawn_logits(chance, num_rows, vocab)
    host, device = HostSampler(vocab, HostTensors()), DeviceSampler(vocab, HostTensors())
    expected, got = (
        sampled(one, logits, [request.row(one, len(request.output)) for request in requests]) for one in (host, device)
    )
    num_forgiven = 0
    for request, line, theirs, ours in zip(requests, logits.numpy(), expected, got, strict=True):
        assert ours.error == theirs.error
        if ours.error is None and ours.token_id != theirs.token_id:
            number = uniform(request.params.seed, len(request.output))
            assert {ours.token_id, theirs.token_id} <= possible(request.adjusted(line), request.params, number)
            num_forgiven += 1
    assert num_forgiven <= 1 + num_rows // 50
    assert sum(one.error is None for one in got) > 0.9 * num_rows


@pytest.mark.parametrize("vocab", [90, 2 * BLOCK_TOKENS + 1, 40_000])
def test_a_row_alone_gives_bit_for_bit_what_it_gives_in_a_batch(vocab: int) -> None:
    chance = random.Random(3)
    num_rows = 2 * ROWS_AT_ONCE + 5 if vocab < 10_000 else 20
    requests = [drawn_request(chance, vocab) for _ in range(num_rows)]
    logits = drawn_logits(chance, num_rows, vocab)
    samplers = DeviceSampler(vocab, HostTensors()), DeviceSampler(vocab, HostTensors())
    together, alone = ([one.row(sampler, len(one.output)) for one in requests] for sampler in samplers)
    expected = sampled(samplers[0], logits, with_logprobs(together))
    got = [sampled(samplers[1], logits[i : i + 1], [one], number=i)[0] for i, one in enumerate(with_logprobs(alone))]
    assert [(one.token_id, one.logprobs) for one in got] == [(one.token_id, one.logprobs) for one in expected]


def with_logprobs(rows: Sequence[SamplingRow]) -> list[SamplingRow]:
    made = []
    for i, one in enumerate(rows):
        values = {name: getattr(one.params, name) for name in one.params.__struct_fields__}
        params = SamplingParams(**{**values, "logprobs": (None, 0, 3, 20)[i % 4]})
        made.append(SamplingRow(params, one.position, one.end_ids, one.masks_ends, one.counts))
    return made


@pytest.mark.parametrize("vocab", [5, BLOCK_TOKENS, 3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS + 1])
def test_greedy_takes_the_lowest_id_among_equals(vocab: int) -> None:
    logits = torch.full((vocab, vocab), -1.0)
    for first in range(vocab):
        logits[first, first:] = 3.0 if first % 2 else -0.0
        logits[first, first] = 3.0 if first % 2 else 0.0
    _, device = of_both(logits, *[row()] * vocab)
    assert [one.token_id for one in device] == list(range(vocab))


def test_numbers_that_are_evenly_spaced_give_each_token_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    count, vocab = 1000, BLOCK_TOKENS + 10
    monkeypatch.setattr("services.worker.engine.device_rows.uniforms", lambda seeds, _: (np.array(seeds) + 0.5) / count)
    torch.manual_seed(6)
    scores = torch.randn(vocab) * 1.5
    for params in ({}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 300, "top_p": 0.8}):
        probabilities = torch.softmax(scores.double() / 0.7, 0).numpy()
        falling = np.argsort(-probabilities)
        probabilities[falling[params.get("top_k", vocab) :]] = 0
        sums = probabilities[falling].cumsum()
        probabilities[falling[int((sums < params.get("top_p", 1.0) * sums[-1]).sum()) + 1 :]] = 0
        rows = [row(seed=seed, temperature=0.7, **params) for seed in range(count)]
        got = sampled(DeviceSampler(vocab, HostTensors()), scores.expand(count, -1), rows)
        counts = np.bincount([one.token_id for one in got], minlength=vocab)
        assert np.abs(counts - probabilities / probabilities.sum() * count).max() < 1.01


LAST = 1 - 2.0**-53
"""The largest number that ``uniform`` gives."""


@pytest.mark.parametrize("first", [1, BLOCK_TOKENS + 3])
@pytest.mark.parametrize("how", [{}, {"top_k": 1_000}, {"top_p": 0.999}], ids=["by id", "top-k", "sorted"])
def test_the_first_and_the_last_numbers_draw_tokens_that_have_a_weight(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], first: int
) -> None:
    vocab = 3 * BLOCK_TOKENS + 4
    logits = torch.full((2, vocab), -torch.inf)
    logits[:, [first, vocab - 2]] = 0.0
    monkeypatch.setattr("services.worker.engine.device_rows.uniforms", lambda *_: np.array([0.0, LAST]))
    got = sampled(DeviceSampler(vocab, HostTensors()), logits, [row(temperature=1.0, **how)] * 2)
    assert [one.token_id for one in got] == [first, vocab - 2]


@pytest.mark.parametrize("how", [{"top_k": 6}, {"top_p": 0.75}, {"top_k": 8, "top_p": 0.7}])
def test_of_equal_scores_those_with_the_lowest_ids_are_kept(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0, 0.0, 0.0, 0.0, -0.0, -1.0]]).repeat(2, 1)
    logits[:, [0, 9]] = -torch.inf
    monkeypatch.setattr("services.worker.engine.device_rows.uniforms", lambda *_: np.array([0.0, LAST]))
    got = sampled(DeviceSampler(10, HostTensors()), logits, [row(temperature=1.0, **how)] * 2)
    assert [one.token_id for one in got] == [1, 6]


def test_what_cannot_be_sampled_has_the_hosts_error_and_the_others_their_tokens() -> None:
    vocab = 700
    torch.manual_seed(1)
    logits = torch.randn(9, vocab)
    logits[0, 600], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[4, :690] = -torch.inf
    outside, drawn = {"logit_bias": ((5, 1.0), (vocab, 1.0))}, {"temperature": 1.0}
    rows = [
        row(**drawn),
        row(**drawn, top_k=5, **outside),
        row(**drawn, top_p=0.9, logprobs=2),
        row(**outside),
        row(min_tokens=1, stop_token_ids=tuple(range(690, vocab))),
        row(**drawn, logprobs=2, **outside),
        *[row(**drawn, logprobs=1, **how) for how in ({}, {"top_k": 5}, {"top_p": 0.9})],
    ]
    host, device = of_both(logits, *rows)
    assert [one.error for one in device] == [one.error for one in host]
    assert [one.error and one.error.code for one in device] == [*["internal"] * 3, *["bad_request"] * 3, *[None] * 3]
    assert [one.token_id for one in device] == [one.token_id for one in host]
    assert [one.logprobs is not None for one in device] == [False] * 6 + [True] * 3


def test_logprobs_are_read_off_the_raw_logits_and_equal_ones_are_in_the_order_of_their_ids() -> None:
    torch.manual_seed(2)
    logits = torch.randn(ROWS_AT_ONCE + 6, 3000) * 4
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[3, :2900] = -torch.inf
    rows = [
        row(seed=i, temperature=1.0, logprobs=(0, 4, None, 120)[i % 4], logit_bias=((7, 30.0),) if i % 3 else ())
        for i in range(len(logits))
    ]
    host, device = of_both(logits, *rows)
    for i, (theirs, ours) in enumerate(zip(host, device, strict=True)):
        assert ours.token_id == theirs.token_id
        if theirs.logprobs is None or ours.logprobs is None:
            assert ours.logprobs is theirs.logprobs is None
            continue
        assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-5)
        values = [value for _, value in ours.logprobs.top]
        assert values == pytest.approx([value for _, value in theirs.logprobs.top], abs=1e-5)
        order = np.lexsort((np.arange(3000), -logits[i].numpy()))
        assert [token_id for token_id, _ in ours.logprobs.top] == order[: len(values)].tolist()


def test_a_batch_begins_with_what_rows_of_the_last_two_steps_sampled() -> None:
    host, device = HostSampler(10, HostTensors()), DeviceSampler(10, HostTensors())
    logits = torch.randn(3, 10)
    logits[1, 4] = torch.nan
    steps = [sampled(device, logits.roll(number, 1), [row()] * 3, number) for number in range(3)]
    for number in range(3):
        sampled(host, logits.roll(number, 1), [row()] * 3, number)

    def named(step: int, at: int, token_id: int = 0) -> Slice:
        return Slice(0, (token_id,), 0, (0,), None, RowOf(step, at))

    slices = named(2, 2), Slice(0, (5, 6), 0, (0,)), named(1, 0, 99), named(2, 1), Slice(0, (7,), 0, (0,)), named(1, 2)
    batch = ForwardBatch(3, slices)
    expected = [steps[2][2].token_id, 5, 6, steps[1][0].token_id, 0, 7, steps[1][2].token_id]
    for one in (host, device):
        assert one.token_ids(one.known(batch)).tolist() == expected
    known = device.known(batch)
    sampled(device, logits, [row()] * 3, 3)
    assert device.token_ids(known).tolist() == expected, "of the time when it was asked"
    assert device.token_ids(device.known(ForwardBatch(4, slices[1:2]))).tolist() == [5, 6]


@pytest.mark.parametrize("step", [RowOf(0, 0), RowOf(2, 3), RowOf(1, -1), RowOf(7, 0)])
def test_a_row_that_none_of_the_newest_steps_has_is_refused_as_by_the_host(step: RowOf) -> None:
    texts = []
    for one in (HostSampler(10, HostTensors()), DeviceSampler(10, HostTensors())):
        for number in range(3):
            sampled(one, torch.randn(3, 10), [row()] * 3, number)
        with pytest.raises(BadRequest) as refused:
            one.known(ForwardBatch(3, (Slice(0, (0,), 0, (0,), None, step),)))
        texts.append(str(refused.value))
    assert texts[0] == texts[1]


def test_a_token_outside_of_the_vocabulary_is_refused() -> None:
    sampler = DeviceSampler(10, HostTensors())
    for token_id in (-1, 10):
        with pytest.raises(BadRequest, match=r"of a vocabulary of 10"):
            sampler.known(ForwardBatch(0, (Slice(0, (3, token_id), 0, (0,)),)))


def test_a_batch_of_which_nothing_is_sampled_gives_nothing() -> None:
    sampler = DeviceSampler(10, HostTensors())
    assert sampler.sample(torch.empty(0, 10), ForwardBatch(0, (Slice(0, (1,), 0, (0,)),)))() == []
    with pytest.raises(BadRequest):
        sampler.known(ForwardBatch(1, (Slice(0, (0,), 0, (0,), None, RowOf(0, 0)),)))
    with pytest.raises(ValueError, match="2 rows"):
        sampler.sample(torch.empty(1, 10), batch_of([row()] * 2))


def penalised(chance: random.Random, seed: int, vocab: int) -> Request:
    params = params_of(
        seed=seed,
        temperature=chance.choice([0.0, 1.0]),
        repetition_penalty=chance.choice([1.0, 1.4]),
        frequency_penalty=chance.uniform(0.1, 1.0),
        presence_penalty=chance.uniform(-0.5, 1.0),
    )
    ids = range(-2, vocab + 3)  # tokens outside of the vocabulary are counted for nothing
    return Request(params, chance.choices(ids, k=seed % 7), chance.choices(ids, k=chance.randrange(6)), ())


def test_counts_follow_what_is_drawn_and_drop_what_is_drawn_again() -> None:
    vocab, chance = 40, random.Random(8)
    host, device = HostSampler(vocab, HostTensors()), DeviceSampler(vocab, HostTensors())
    requests = [penalised(chance, seed, vocab) for seed in range(30)]
    positions = [len(request.output) for request in requests]
    num_last = [min(2, position) for position in positions]
    for number in range(60):
        chosen = chance.sample(range(30), k=chance.randrange(1, 20))
        logits = torch.randn(len(chosen), vocab, generator=torch.Generator().manual_seed(number))
        made = [[requests[i].row(one, positions[i]) for i in chosen] for one in (host, device)]
        expected, got = (sampled(one, logits, rows, number) for one, rows in zip((host, device), made, strict=True))
        assert got == expected
        for i in chosen:
            again = chance.choice([0, 0, 0, 1, min(2, num_last[i] + 1)])  # this step has failed, or the one before it
            positions[i] += 1 - again
            num_last[i] = min(2, num_last[i] + 1) - again


def test_a_position_that_is_too_long_ago_is_refused_and_nothing_has_changed() -> None:
    vocab, logits = 8, torch.zeros(1, 8)
    device = DeviceSampler(vocab, HostTensors())
    request = Request(params_of(presence_penalty=1.0), (), (1, 2, 3, 4), ())
    for position in (5, 1, -1):
        with pytest.raises(ValueError, match=f"counts of 4 tokens, to sample the one at {position}"):
            sampled(device, logits, [request.row(device, position)])
    assert sampled(device, logits, [request.row(device, 2)])[0].token_id == 0, "3 and 4 are taken out, 1 and 2 not"
    with pytest.raises(ValueError, match="counts of 3 tokens, to sample the one at 1"):
        sampled(device, logits, [request.row(device, 1)])
    with pytest.raises(ValueError, match="twice"):
        sampled(device, logits.expand(2, -1), [request.row(device, 3)] * 2)
    assert [sampled(device, logits, [request.row(device, at)])[0].token_id for at in (3, 4, 5)] == [3, 4, 5]


def test_what_a_row_with_an_error_drew_counts_for_nothing() -> None:
    device = DeviceSampler(4, HostTensors())
    request = Request(params_of(presence_penalty=9.0), (), (), ())
    bad = torch.tensor([[0.0, torch.nan, 0.0, 0.0]])
    assert sampled(device, bad, [request.row(device, 0)])[0].error is not None
    assert sampled(device, torch.zeros(1, 4), [request.row(device, 1)])[0].token_id == 0
    assert [sampled(device, torch.zeros(1, 4), [request.row(device, at)])[0].token_id for at in (0, 1)] == [0, 1]


def test_a_token_outside_of_the_vocabulary_is_taken_out_of_nobodys_counts() -> None:
    vocab = 6
    device, penalty = DeviceSampler(vocab, HostTensors()), params_of(presence_penalty=9.0)
    one, other = Request(penalty, (), (0, vocab + 1), ()), Request(penalty, (), (1,), ())
    got = sampled(device, torch.zeros(2, vocab), [one.row(device, 2), other.row(device, 1)])
    assert [each.token_id for each in got] == [1, 0]
    got = sampled(device, torch.zeros(2, vocab), [one.row(device, 1), other.row(device, 2)])
    assert [each.token_id for each in got] == [1, 2]


def test_counts_that_are_gone_leave_their_memory_to_the_next_ones() -> None:
    device, logits = DeviceSampler(6, HostTensors()), torch.zeros(1, 6)
    table = device.counts
    kept = Request(params_of(presence_penalty=9.0), (), (0,), ())
    for _ in range(40):
        request = Request(params_of(presence_penalty=9.0), (), (3,), ())
        assert [sampled(device, logits, [request.row(device, at)])[0].token_id for at in (1, 2)] == [0, 1]
        assert sampled(device, logits, [kept.row(device, 1)])[0].token_id == 1
        assert table.num_slots == 2
        del request
        gc.collect()
        assert table.num_slots == 1
    many = [Request(params_of(presence_penalty=9.0), (), (seed % 6,), ()) for seed in range(21)]
    got = sampled(device, logits.expand(21, -1), [one.row(device, 1) for one in many])
    assert [one.token_id for one in got] == [1 if seed % 6 == 0 else 0 for seed in range(21)]
    assert table.num_bytes == 32 * (6 * 4 + 2 * 8)
    assert sampled(device, logits, [kept.row(device, 2)])[0].token_id == 2, "the table has grown"


class CountedTensors(HostTensors):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        self.calls.append(f"up {len(arrays)}")
        return super().upload(*arrays)

    def download(self, *tensors: torch.Tensor) -> list[Array]:
        self.calls.append(f"down {len(tensors)}")
        return super().download(*tensors)


def test_a_step_uploads_once_and_downloads_once_and_greedy_ones_upload_nothing() -> None:
    tensors, chance = CountedTensors(), random.Random(2)
    sampler = DeviceSampler(2000, tensors)
    requests = [drawn_request(chance, 2000) for _ in range(50)]
    rows = with_logprobs([one.row(sampler, len(one.output)) for one in requests])
    sampled(sampler, drawn_logits(chance, 50, 2000), rows)
    assert tensors.calls == ["up 1", "down 2"]
    tensors.calls.clear()
    sampled(sampler, torch.randn(5, 2000), [row()] * 5, 1)
    assert tensors.calls == ["down 1"]
    tensors.calls.clear()
    sampler.token_ids(sampler.known(ForwardBatch(2, tuple(Slice(0, (0,), 0, (0,), None, RowOf(s, s)) for s in (0, 1)))))
    assert tensors.calls == ["up 1"]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """However deep."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors_in(one)]
    return [value] if isinstance(value, torch.Tensor) else []


class NothingWaits(TorchDispatchMode):
    """``Tensors`` that are watched. Fails for an operation that a device would wait for, or that takes memory of the
    host."""

    WAITS = frozenset({
        "_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "bincount",
        "repeat_interleave", "lift_fresh", "lift_fresh_copy", "scalar_tensor",
    })  # fmt: skip

    def __init__(self, tensors: HostTensors) -> None:
        super().__init__()
        self.device, self._inner = tensors.device, tensors
        self.names: set[str] = set()
        self._copies = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._copies:
            return made
        name = str(func.overloadpacket).removeprefix("aten.").rstrip("_")
        self.names.add(name)
        assert name not in self.WAITS, name
        assert {one.device for one in tensors_in([args, kwargs or {}, made])} <= {self.device}, name
        if name in ("index", "index_put"):
            assert all(one is None or one.dtype == torch.int64 for one in args[1]), "a mask as an index"
        return made

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        self._copies = True
        tensors = self._inner.upload(*arrays)
        self._copies = False
        return tensors

    def download(self, *tensors: torch.Tensor) -> list[Array]:
        return self._inner.download(*tensors)


class MetaTensors(HostTensors):
    """A device on which nothing is: whatever looks at a value fails."""

    device = torch.device("meta")

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        return [torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device="meta") for array in arrays]

    def download(self, *tensors: torch.Tensor) -> list[Array]:
        return [np.zeros(tuple(tensor.shape)) for tensor in tensors]


@pytest.mark.parametrize("tensors", [HostTensors(), MetaTensors()], ids=["cpu", "meta"])
def test_nothing_waits_for_the_device_or_takes_what_is_not_there(tensors: HostTensors) -> None:
    vocab, chance = 2000, random.Random(5)
    watch = NothingWaits(tensors)
    sampler = DeviceSampler(vocab, watch)
    requests = [drawn_request(chance, vocab) for _ in range(150)]
    logits = drawn_logits(chance, 150, vocab).to(tensors.device)
    with watch:
        for number in range(4):
            rows = [one.row(sampler, len(one.output) + number // 2) for one in requests]
            drawn = sampler.sample(logits.clone(), batch_of(with_logprobs(rows), number))
            named = [Slice(0, (0,), 0, (0,), None, RowOf(number, i)) for i in range(0, 150, 7)]
            sampler.token_ids(sampler.known(ForwardBatch(9, tuple(named))))
    assert {"sort", "topk", "index_add", "searchsorted", "index_put", "where"} <= watch.names
    assert len(drawn()) == 150


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x + torch.tensor([1.0]),
        lambda x: x.sum().item(),
        lambda x: x[torch.from_numpy(np.array([True, False]))],
    ],
)
def test_what_waits_is_seen(waits: Any) -> None:
    x = torch.ones(2)
    with pytest.raises(AssertionError), NothingWaits(HostTensors()):
        waits(x)
