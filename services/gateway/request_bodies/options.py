"""The parameters that chat and text completions share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from services.gateway.request_bodies.body import read_fields, shown
from services.gateway.request_bodies.guided import Guide, GuidedFields, read_guide
from services.gateway.request_bodies.tools import ChatTools
from shared.errors import BadRequest, UnsupportedParameter
from shared.messages.generation import SamplingParams

V = TypeVar("V")

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_SALT_CHARACTERS = 256
MAX_N = 16
"""Choices of one prompt. Each is a stream of its own at the workers, with the whole prompt."""

_REFUSED_IF_SET = {
    "tools": "tools are",
    "functions": "functions are",
    "function_call": "functions are",
    "audio": "audio output is",
    "prediction": "predicted output is",
    "suffix": "text after the completion is",
    "guided_whitespace_pattern": "a whitespace pattern is",
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
    "web_search_options": "web search is",
    "chat_template": "a chat template from the caller is",
    "continue_final_message": "continuing the last message is",
}
"""Known to other systems, not supported here: any value except null, false, empty or zero is refused."""
_REFUSED_UNLESS = {
    "tool_choice": ((None, "none", "auto"), "tools are"),
    "modalities": ((None, ["text"]), "anything but text is"),
}
_CHOICE_OF = {"tools": "tool_choice", "functions": "function_call"}
"""What the caller forbids to be called (``none``) may be named."""
_NAMES = (*_REFUSED_IF_SET, *_REFUSED_UNLESS)
_LONGEST_HARMLESS_BYTES = 64
"""No accepted value is longer, so longer ones are refused without a look inside."""

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=2**31)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)],
    Meta(
        description=f"a string or an array of at most {MAX_STOP_STRINGS} strings, "
        f"of 1 to {MAX_STOP_CHARACTERS} characters"
    ),
]
StopTokenIds = Annotated[
    list[Annotated[int, Meta(ge=0, le=2**31)]],
    Meta(max_length=MAX_STOP_TOKEN_IDS, description=f"an array of at most {MAX_STOP_TOKEN_IDS} token ids"),
]
LogitBias = Annotated[
    dict[Annotated[int, Meta(ge=0, le=2**31)], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(
        max_length=MAX_LOGIT_BIAS,
        description=f"an object of at most {MAX_LOGIT_BIAS} token ids with numbers from -100 to 100",
    ),
]


class StreamOptions(msgspec.Struct):
    """What a stream's events carry."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedBody(GuidedFields, kw_only=True):
    """What the bodies of both generating routes declare. ``None`` is absent."""

    model: Annotated[str, Meta(min_length=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: Count | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    ignore_eos: bool | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate and what to return. ``None`` where the default depends on the request."""

    sampling: SamplingParams
    """But for ``max_tokens`` and ``seed``, which depend on the prompt."""
    seed: int | None
    max_tokens: int | None
    default_max_tokens: int | None
    """Without ``max_tokens``: this many, or fewer if the context leaves fewer; None for all that it leaves."""
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    include_stop_string: bool
    skip_special_tokens: bool
    cache_salt: str
    """Requests with another one use other KV. Empty: none was given."""
    prompt_cache_key: str
    """Requests with the same one belong together. Empty: none was given."""
    priority: int = 0
    """Lower ones of a key go first."""
    n: int = 1
    """Choices of each prompt."""
    tools: ChatTools | None = None
    """What the model may call; None: nothing, and what it writes is text."""
    guide_param: str = ""
    """The parameter that ``sampling.grammar`` came from."""
    prompt_logprobs: int | None = None
    """Alternatives per token of the prompt in the answer's own field; None: there is none."""
    echo_logprobs: int | None = None
    """Alternatives per token of the prompt that the text begins with; None: its tokens have none."""
    no_output: bool = False
    """The answer is the prompt: the token behind it, which computing it comes with, is left out."""

    @property
    def scores_param(self) -> str:
        """The parameter that asks for log-probabilities of the prompt."""
        return "prompt_logprobs" if self.prompt_logprobs is not None else "logprobs"


def refuse_unsupported(raw: bytes, body: SharedBody, *, supported: tuple[str, ...] = ()) -> None:
    """Raise ``UnsupportedParameter`` for what this system knows but does not support; ``supported`` is, here."""
    values = dict(zip(_NAMES, read_fields(raw, _NAMES), strict=True))
    for name, value in values.items():
        if not value or name in supported or values.get(_CHOICE_OF.get(name, "")) == b'"none"':
            continue
        harmless = msgspec.json.decode(value) if len(value) <= _LONGEST_HARMLESS_BYTES else value
        if name in _REFUSED_IF_SET:
            if harmless and (name, harmless) != ("function_call", "none"):
                raise _unsupported(name, _REFUSED_IF_SET[name])
        elif harmless not in _REFUSED_UNLESS[name][0]:
            raise _unsupported(name, _REFUSED_UNLESS[name][1])
    if body.best_of not in (None, 1, body.n):
        raise _unsupported("best_of", "choosing among more completions than n is")


def refuse_more_choices(body: SharedBody) -> None:
    """Where an answer is one."""
    if body.n not in (None, 1):
        raise _unsupported("n", "more than one answer is")


def read_options(
    body: SharedBody,
    *,
    vocab_size: int,
    max_tokens: int | None,
    default_max_tokens: int | None = None,
    logprobs: int | None,
    tools: ChatTools | None = None,
    guide: Guide | None = None,
    prompt_logprobs: int | None = None,
    echoes: bool = False,
) -> Options:
    """The options in a request body; ``max_tokens``, ``logprobs`` and a ``guide`` are read by callers whose names
    differ. ``max_tokens`` 0: the answer is the prompt, which it ``echoes``."""
    stream = _or(body.stream, False)
    usage = body.stream_options
    if usage is not None and not stream:
        raise BadRequest("stream_options is only allowed with stream", param="stream_options")
    min_tokens = _or(body.min_tokens, 0)
    if stream and prompt_logprobs:
        raise BadRequest("prompt_logprobs is not available with stream", param="prompt_logprobs")
    listed, echoed = None if stream else prompt_logprobs, logprobs if echoes else None
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens {min_tokens} is above max_tokens {max_tokens}", param="min_tokens")
    include_usage = usage is not None and _or(usage.include_usage, False)
    continuous_usage = usage is not None and _or(usage.continuous_usage_stats, False)
    guide = guide or read_guide(body)
    if guide is not None and tools is not None and guide.grammar.kind != "json_schema":
        raise UnsupportedParameter(
            f"{guide.param}: together with tools only a JSON schema is supported", param=guide.param
        )
    sampling = SamplingParams(
        max_tokens=0,
        seed=0,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(_or(body.top_k, 0), 0),
        min_tokens=min_tokens,
        ignore_eos=_or(body.ignore_eos, False),
        stop_token_ids=_known("stop_token_ids", tuple(body.stop_token_ids or ()), vocab_size),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body, vocab_size),
        logprobs=logprobs,
        grammar=guide.grammar if guide is not None else None,
        prompt_logprobs=max([wanted for wanted in (listed, echoed) if wanted is not None], default=None),
    )
    return Options(
        sampling=sampling,
        seed=body.seed,
        max_tokens=1 if max_tokens == 0 else max_tokens,
        default_max_tokens=default_max_tokens,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and continuous_usage,
        include_stop_string=_or(body.include_stop_str_in_output, False),
        skip_special_tokens=_or(body.skip_special_tokens, True),
        cache_salt=body.cache_salt or "",
        n=_or(body.n, 1),
        priority=_or(body.priority, 0),
        prompt_cache_key=body.prompt_cache_key or "",
        tools=tools,
        guide_param=guide.param if guide is not None else "",
        prompt_logprobs=listed,
        echo_logprobs=echoed,
        no_output=max_tokens == 0,
    )


def _or(value: V | None, default: V) -> V:
    return default if value is None else value


def _unsupported(name: str, what: str) -> UnsupportedParameter:
    """The error for something that OpenAI or vLLM know and this system does not support."""
    return UnsupportedParameter(f"{name}: {what} not supported", param=name)


def _known(name: str, token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    wrong = next((i for i in token_ids if i >= vocab_size), None)
    if wrong is not None:
        raise BadRequest(f"{name} must have token ids from 0 to {vocab_size - 1}, not {shown(wrong)}", param=name)
    return token_ids


def _logit_bias(body: SharedBody, vocab_size: int) -> tuple[tuple[int, float], ...]:
    bias = body.logit_bias or {}
    _known("logit_bias", tuple(bias), vocab_size)
    return tuple(sorted(bias.items()))
