"""When a request ends."""

import pytest

from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.generation import SamplingParams


def sequence(output=(), *, prompt=(1, 2, 3), eos=(0,), **params):
    return ActiveSequence(
        request_id="r", attempt=0, gateway_id="g", prompt=prompt, output=output, eos_token_ids=eos,
        params=SamplingParams(**{"max_tokens": 10, "seed": 1, **params}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("output", "params", "context_tokens", "reason"),
    [
        ((5,), {}, 99, None),
        ((5, 0), {}, 99, "stop"),
        ((5, 0), {"ignore_eos": True}, 99, None),
        ((5, 7), {"stop_token_ids": (7,)}, 99, "stop"),
        ((5, 7), {"stop_token_ids": (7,), "ignore_eos": True}, 99, "stop"),
        ((5, 0), {"min_tokens": 2}, 99, None),
        ((5, 5, 0), {"min_tokens": 2}, 99, "stop"),
        ((5, 5), {"max_tokens": 2}, 99, "length"),
        ((5, 0), {"max_tokens": 2}, 99, "stop"),
        ((5, 5), {}, 5, "length"),
        ((), {"max_tokens": 0}, 99, "length"),
    ],
)
def test_a_request_ends_for_the_right_reason(output, params, context_tokens, reason):
    assert sequence(output, **params).finish_reason(context_tokens) == reason


def test_a_continuation_counts_streamed_tokens_as_output():
    seq = sequence((8, 9), max_tokens=3)
    seq.append(4)
    out = seq.emit(4, None, seq.finish_reason(99))
    assert (out.offset, out.token_ids, out.finish_reason) == (2, (4,), "length")
    assert seq.tokens == [1, 2, 3, 8, 9, 4]
