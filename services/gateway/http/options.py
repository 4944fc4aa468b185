"""The parameters that chat and text completions share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.gateway.http.fields import Fields
from shared.errors import BadRequest

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024

_REFUSED_IF_SET = {
    "tools": "tools are",
    "functions": "functions are",
    "function_call": "functions are",
    "audio": "audio output is",
    "prediction": "predicted output is",
    "suffix": "text behind the completion is",
    "guided_json": "guided decoding is",
    "guided_regex": "guided decoding is",
    "guided_choice": "guided decoding is",
    "guided_grammar": "guided decoding is",
    "structured_outputs": "guided decoding is",
    "prompt_logprobs": "log-probabilities of the prompt are",
    "min_p": "min_p is",
    "typical_p": "typical_p is",
    "length_penalty": "length_penalty is",
    "use_beam_search": "beam search is",
    "logits_processors": "logits processors are",
    "truncate_prompt_tokens": "truncating prompts is",
    "prompt_embeds": "prompts as embeddings are",
    "bad_words": "bad_words is",
    "allowed_token_ids": "allowed_token_ids is",
    "echo_logprobs": "echo with logprobs is",
    "web_search_options": "web search is",
    "chat_template": "a chat template of the caller's is",
    "continue_final_message": "continuing the last message is",
}
"""Known elsewhere, not done here: any value but null, false, empty or zero is refused."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate and what to return. ``None`` where the default depends on the request."""

    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    max_tokens: int | None
    default_max_tokens: int | None
    """Without ``max_tokens``: this many, or fewer if the context leaves fewer; None for all that it leaves."""
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    logprobs: int | None
    """Alternatives per token (0: the token's own alone), None for no log-probabilities."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    include_stop_string: bool
    skip_special_tokens: bool


def refuse_unsupported(fields: Fields) -> None:
    """Raise ``UnsupportedParameter`` for what this system knows of and does not do."""
    for key, what in _REFUSED_IF_SET.items():
        if fields.raw(key):
            raise fields.unsupported(key, what)
    for key in ("n", "best_of"):
        if fields.integer(key, 1, low=1, high=2**31) != 1:
            raise fields.unsupported(key, "more than one completion per prompt is")
    choice = fields.raw("tool_choice")
    if choice is not None and choice not in ("none", "auto"):
        raise fields.unsupported("tool_choice", "tools are")
    response_format = fields.raw("response_format")
    if response_format is not None and fields.object("response_format").raw("type") != "text":
        raise fields.unsupported("response_format", "anything but text is")
    modalities = fields.raw("modalities")
    if modalities is not None and modalities != ["text"]:
        raise fields.unsupported("modalities", "anything but text is")


def read_options(
    fields: Fields,
    *,
    vocab_size: int,
    max_tokens: int | None,
    default_max_tokens: int | None = None,
    logprobs: int | None,
) -> Options:
    """The options in a request body; ``max_tokens`` and ``logprobs`` are read by the caller, whose names differ."""
    stream = fields.flag("stream", False)
    stream_options = fields.object("stream_options")
    if fields.raw("stream_options") is not None and not stream:
        raise BadRequest("stream_options is only allowed with stream", param="stream_options")
    min_tokens = fields.integer("min_tokens", 0, low=0, high=2**31)
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens {min_tokens} is above max_tokens {max_tokens}", param="min_tokens")
    include_usage = stream_options.flag("include_usage", False)
    continuous_usage = stream_options.flag("continuous_usage_stats", False)
    top_k = fields.integer("top_k", 0, low=-1, high=2**31)
    return Options(
        temperature=fields.number("temperature", 1.0, low=0, high=2),
        top_p=fields.number("top_p", 1.0, low=0, high=1, open_low=True),
        top_k=max(top_k, 0),
        seed=fields.optional_integer("seed", low=-(2**63), high=2**63 - 1),
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        min_tokens=min_tokens,
        ignore_eos=fields.flag("ignore_eos", False),
        stop=_stop(fields),
        stop_token_ids=fields.token_ids("stop_token_ids", vocab_size=vocab_size),
        frequency_penalty=fields.number("frequency_penalty", 0.0, low=-2, high=2),
        presence_penalty=fields.number("presence_penalty", 0.0, low=-2, high=2),
        repetition_penalty=fields.number("repetition_penalty", 1.0, low=0, high=2, open_low=True),
        logit_bias=_logit_bias(fields, vocab_size),
        logprobs=logprobs,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and continuous_usage,
        include_stop_string=fields.flag("include_stop_str_in_output", False),
        skip_special_tokens=fields.flag("skip_special_tokens", True),
    )


def _stop(fields: Fields) -> tuple[str, ...]:
    value: Any = fields.raw("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOP_STRINGS
        or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARACTERS for s in stops)
    ):
        raise fields.wrong(
            "stop",
            f"a string or an array of at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
        )
    return tuple(stops)


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    value: Any = fields.raw("logit_bias")
    if value is None:
        return ()
    wanted = f"an object of at most {MAX_LOGIT_BIAS} token ids (0 to {vocab_size - 1}) with numbers from -100 to 100"
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise fields.wrong("logit_bias", wanted)
    pairs = []
    for key, bias in value.items():
        in_range = key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size
        if not in_range or isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise BadRequest(f"logit_bias must be {wanted}; entry {key!r} is not", param="logit_bias")
        pairs.append((int(key), float(bias)))
    return tuple(sorted(pairs))
