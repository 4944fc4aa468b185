"""The bodies of ``POST /tokenize`` and ``POST /detokenize``, as vLLM has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Raw, Struct

from services.gateway.request_bodies.body import (
    read_json,
    refuse_large_text,
    refuse_many_ids,
    refuse_unknown_ids,
    required,
)
from services.gateway.request_bodies.chat_request import ChatBody, ChatRequest, read_chat_request
from services.gateway.request_bodies.options import refuse_unsupported
from shared.errors import BadRequest

_TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=2**31)]], Meta(description="an array of token ids")]


class TokenizeBody(ChatBody, kw_only=True):
    """The body as it comes: a prompt, or all that a chat's may have."""

    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    """The body as it comes."""

    model: Annotated[str, Meta(min_length=1)] | None = None
    tokens: Raw = Raw(b"null")


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A checked request: a text, which may be empty, or a conversation."""

    source: str | ChatRequest
    add_special_tokens: bool
    """Of a text."""
    return_token_strs: bool


def read_tokenize_request(raw: bytes, body: TokenizeBody, *, vocab_size: int, max_prompt_bytes: int) -> TokenizeRequest:
    """Raises ``BadRequest``, ``UnsupportedParameter`` and ``PayloadTooLarge``, naming the parameter."""
    source: str | ChatRequest
    if bytes(body.messages) == b"null":
        refuse_unsupported(raw, body)
        source = required(body.prompt, "prompt")
        refuse_large_text(source, max_bytes=max_prompt_bytes, param="prompt")
    else:
        if body.prompt is not None:
            raise BadRequest("messages cannot be given beside prompt", param="messages")
        source = read_chat_request(raw, body, vocab_size=vocab_size, max_prompt_bytes=max_prompt_bytes)
    return TokenizeRequest(source, body.add_special_tokens is not False, body.return_token_strs is True)


def read_tokens(body: DetokenizeBody, *, vocab_size: int, max_bytes: int) -> list[int]:
    """The ids that are to become text, maybe none. Raises ``BadRequest`` and ``PayloadTooLarge``."""
    json = bytes(body.tokens)
    refuse_many_ids(json.count(b",") + 1, max_bytes=max_bytes, param="tokens")
    token_ids: list[int] = required(read_json(json, _TokenIds | None, "tokens"), "tokens")
    if token_ids:
        refuse_unknown_ids(token_ids, vocab_size=vocab_size, param="tokens")
    return token_ids
