"""What a request must be for an engine to compute it."""

from __future__ import annotations

from shared import subjects
from shared.errors import BadRequest, Overloaded
from shared.messages.generation import MAX_PROMPT_LOGPROBS_BYTES, Submit, prompt_logprobs_bytes

MAX_NUMBER = 2**31
"""Of tokens, and of what is counted in them."""
MAX_LOGPROBS = 1000
MAX_FIGURE = 1e6
"""Far beyond what gateways take from their clients."""


def check_request(request: Submit, vocab_size: int) -> None:
    """Raises ``BadRequest`` for tokens that the model lacks, sampling that is out of range, and names that no process
    can have."""
    _check_vocabulary(request, vocab_size)
    _check_sampling(request, vocab_size)
    _check_addresses(request)


def _check_vocabulary(request: Submit, vocab_size: int) -> None:
    """Raises ``BadRequest`` for a token that the model does not have: an engine would fail with its batch."""
    for param, token_ids in (("prompt", request.prompt_token_ids), ("output_token_ids", request.output_token_ids)):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
            raise BadRequest(f"{param}: token id {wrong} is outside 0..{vocab_size - 1}", param=param)


def _check_sampling(request: Submit, vocab_size: int) -> None:
    """Raises ``BadRequest`` for what no gateway asks for: a sampler would fail with its batch, or draw nothing."""
    params = request.sampling
    ranges = (
        ("attempt", request.attempt, 0, MAX_NUMBER),
        ("alone_tokens", request.alone_tokens, 0, MAX_NUMBER),
        ("max_tokens", params.max_tokens, 0, MAX_NUMBER),
        ("min_tokens", params.min_tokens, 0, MAX_NUMBER),
        ("seed", params.seed, -(2**63), 2**63 - 1),
        ("top_k", params.top_k, 0, MAX_NUMBER),
        ("logprobs", params.logprobs or 0, 0, MAX_LOGPROBS),
        ("prompt_logprobs", params.prompt_logprobs or 0, 0, MAX_LOGPROBS),
        ("temperature", params.temperature, 0.0, MAX_FIGURE),
        ("top_p", params.top_p, 0.0, 1.0),
        ("repetition_penalty", params.repetition_penalty, 0.0, MAX_FIGURE),
        ("frequency_penalty", params.frequency_penalty, -MAX_FIGURE, MAX_FIGURE),
        ("presence_penalty", params.presence_penalty, -MAX_FIGURE, MAX_FIGURE),
    )
    for param, value, low, high in ranges:
        # What is not a number is in no range.
        if not low <= value <= high:
            raise BadRequest(f"{param} {value} is outside {low}..{high}", param=param)
    if params.prompt_logprobs is not None:
        size = prompt_logprobs_bytes(len(request.prompt_token_ids), params.prompt_logprobs)
        if size > MAX_PROMPT_LOGPROBS_BYTES:
            raise BadRequest(
                f"prompt_logprobs: {size} bytes, at most {MAX_PROMPT_LOGPROBS_BYTES} are allowed",
                param="prompt_logprobs",
            )
    if not params.repetition_penalty:
        raise BadRequest("repetition_penalty must not be 0", param="repetition_penalty")
    for token_id, bias in params.logit_bias:
        if not (0 <= token_id < vocab_size and -MAX_FIGURE <= bias <= MAX_FIGURE):
            raise BadRequest(f"logit_bias: no bias of {bias} for token id {token_id}", param="logit_bias")
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"stop_token_ids: token id {token_id} is outside 0..{vocab_size - 1}", param="stop_token_ids"
            )


def _check_addresses(request: Submit) -> None:
    """Raises ``BadRequest`` for a gateway or a decode instance that cannot be spoken to."""
    subjects.tokens(request.gateway)
    if request.decode_at is not None:
        subjects.worker_submit(request.decode_at.worker)


def check_slot(instance_id: str, taken: int, slots: int) -> None:
    """For a request that may not wait for others to end. Raises ``Overloaded`` if as many are here as may run."""
    if taken >= slots:
        raise Overloaded(f"all {slots} slots of {instance_id} are taken ({taken} requests)")
