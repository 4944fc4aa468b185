"""Of vLLM's lists, log-probabilities of a prompt in words that a frame holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import msgspec
import pytest

from services.gateway.http.prompt_logprobs import PromptToken, tokens_of
from services.worker.vllm.blitz_vllm import scores, words
from shared.messages.generation import PromptLogprobs


@dataclass
class Flat:
    """As vLLM's ``FlatLogprobs``: of each token but the first a row, its own and then the likeliest."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


def flat_of(rows: int, num_top: int) -> Flat:
    flat = Flat([], [], [])
    for row in range(rows):
        flat.token_ids += [1000 + row, *(10 * row + place for place in range(num_top))]
        flat.logprobs += [-float(row), *(-0.5 - place for place in range(num_top))]
        flat.ranks += [7 + row, *range(1, num_top + 1)]
    return flat


def expected(row: int, num_top: int) -> PromptToken:
    top = [(10 * row + place, -0.5 - place) for place in range(num_top)]
    return PromptToken(row + 1, -float(row), 7 + row, top)


def request(num_tokens: int, num_top: int, *, num_output: int = 0) -> words.Add:
    sampling = words.Sampling(max_tokens=1, seed=0, prompt_logprobs=num_top)
    return words.Add(id="1:r", token_ids=(5,) * num_tokens, num_output=num_output, sampling=sampling)


def read(piece: words.PromptScores) -> PromptLogprobs:
    """As it comes behind the socket."""
    sent = words.to_worker.decode(words.frame(piece)[words.LENGTH_BYTES :])
    assert isinstance(sent, words.PromptScores)
    fields = msgspec.structs.asdict(sent)
    assert fields.pop("id") == "1:r"
    return PromptLogprobs(**fields)


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("piece_bytes", [1, 500, 1 << 20])
def test_each_position_is_said_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch, num_top: int, piece_bytes: int
) -> None:
    monkeypatch.setattr(scores, "PIECE_BYTES", piece_bytes)
    said = [read(piece) for piece in scores.pieces(request(41, num_top), flat_of(40, num_top))]
    assert all(piece.is_whole and piece.num_top == num_top for piece in said)
    assert (said[0].start, said[-1].end) == (1, 41)
    assert all(one.end == other.start for one, other in pairwise(said))
    sizes = [len(piece.logprobs + piece.ranks + piece.top_ids + piece.top_logprobs) for piece in said]
    assert max(sizes) <= max(piece_bytes, 8 * (num_top + 1))
    assert [token for piece in said for token in tokens_of(piece)] == [expected(row, num_top) for row in range(40)]


def test_what_was_put_out_before_is_no_prompt() -> None:
    [piece] = scores.pieces(request(41, 1, num_output=10), flat_of(40, 1))
    assert (read(piece).start, read(piece).end) == (1, 31)
    assert list(scores.pieces(request(11, 1, num_output=10), flat_of(10, 1))) == []
