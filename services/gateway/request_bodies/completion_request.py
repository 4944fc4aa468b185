"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Raw

from services.gateway.request_bodies.body import (
    MAX_SHOWN_CHARACTERS,
    read_json,
    refuse_large_text,
    refuse_many_elements,
    refuse_many_ids,
    refuse_unknown_ids,
)
from services.gateway.request_bodies.options import MAX_LOGPROBS, Options, SharedBody, read_options, refuse_unsupported
from shared.errors import BadRequest

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256
MAX_CHOICES = 256
"""Of all prompts of a request together."""
MAX_MIXED_ELEMENTS = 65_536
"""Items of a list of texts, in which arrays of token ids may be too."""

Prompt = str | tuple[int, ...]
_WANTED = "a string, an array of token ids, or a non-empty array of either"
_BLANKS = b" \t\r\n"
_BETWEEN = _BLANKS + b","
_NUMBER = b"-0123456789"


class CompletionBody(SharedBody, kw_only=True):
    """The body as it comes."""

    prompt: Raw = Raw(b"null")
    max_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked text completion request: ``n`` choices per prompt, in order."""

    prompts: tuple[Prompt, ...]
    echo: bool
    add_special_tokens: bool
    options: Options
    repeated: bytes = b""


def read_completion_request(
    raw: bytes, body: CompletionBody, *, vocab_size: int, max_prompt_bytes: int
) -> CompletionRequest:
    """Raises ``BadRequest`` and ``UnsupportedParameter`` naming the parameter.

    Raises ``PayloadTooLarge`` for a single prompt that cannot fit ``max_prompt_bytes``; together they may exceed it.
    """
    refuse_unsupported(raw, body, supported=("prompt_logprobs",))
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens must be at least 1 without echo, not 0", param="max_tokens")
    prompts = _prompts(bytes(body.prompt), vocab_size, max_prompt_bytes)
    _refuse_many_choices(len(prompts), body.n or 1)
    return CompletionRequest(
        prompts=prompts,
        echo=body.echo is True,
        add_special_tokens=body.add_special_tokens is not False,
        options=read_options(
            body,
            vocab_size=vocab_size,
            max_tokens=body.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
            echoes=body.echo is True,
        ),
    )


def _prompts(json: bytes, vocab_size: int, max_bytes: int) -> tuple[Prompt, ...]:
    if json == b"null":
        raise BadRequest("prompt is required", param="prompt")
    if json[:1] != b"[" or _first_item(json) in _NUMBER:
        return (_prompt(json, vocab_size, max_bytes),)
    items = _with_texts(json) if b'"' in json else _arrays(json)
    if not items:
        raise BadRequest(f"prompt must be {_WANTED}, not an array of 0", param="prompt")
    return tuple(_prompt(item, vocab_size, max_bytes) for item in items)


def _with_texts(json: bytes) -> list[bytes]:
    refuse_many_elements(json, MAX_MIXED_ELEMENTS, "prompt")
    items: list[Raw] = read_json(json, list[Raw], "prompt")
    _refuse_many_prompts(len(items))
    return [bytes(item) for item in items]


def _arrays(json: bytes) -> list[bytes]:
    """The items of an array of arrays of numbers, one by one: made in one go, millions of ids would take long."""
    _refuse_many_prompts(json.count(b"[") - 1)
    pieces = [piece.strip(_BETWEEN) for piece in json[1:-1].split(b"]")]
    return [piece + b"]" if piece[:1] == b"[" else piece for piece in pieces if piece]


def _refuse_many_prompts(count: int) -> None:
    if count > MAX_PROMPTS:
        raise BadRequest(f"prompt has {count} prompts; at most {MAX_PROMPTS} are allowed", param="prompt")


def _refuse_many_choices(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES:
        raise BadRequest(
            f"n {n} of {num_prompts} prompts makes {num_prompts * n} choices; at most {MAX_CHOICES} are allowed",
            param="n",
        )


def _first_item(json: bytes) -> int:
    """The first character of an array's first item (or the array's end)."""
    at = 1
    while json[at] in _BLANKS:
        at += 1
    return json[at]


def _prompt(json: bytes, vocab_size: int, max_bytes: int) -> Prompt:
    if json[:1] == b'"':
        text: str = read_json(json, str, "prompt")
        if not text:
            raise BadRequest("prompt must not be empty", param="prompt")
        refuse_large_text(text, max_bytes=max_bytes, param="prompt")
        return text
    if json[:1] != b"[":
        found = json[:MAX_SHOWN_CHARACTERS].decode(errors="replace")
        raise BadRequest(f"prompt must be {_WANTED}, not {found}", param="prompt")
    refuse_many_ids(json.count(b",") + 1, max_bytes=max_bytes, param="prompt")
    token_ids: list[int] = read_json(json, _TokenIds, "prompt")
    if not token_ids:
        raise BadRequest("prompt must not be empty", param="prompt")
    refuse_unknown_ids(token_ids, vocab_size=vocab_size, param="prompt")
    return tuple(token_ids)


_TokenIds = Annotated[
    list[Annotated[int, Meta(ge=-(2**31), le=2**31)]], Meta(description="strings or arrays of token ids")
]
