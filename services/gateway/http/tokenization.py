"""``POST /tokenize`` and ``POST /detokenize``: what vLLM's clients count tokens with.

The gateway has what they need, so they cost no worker, count against no limit of a key, and work while a model sleeps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from services.gateway.core.routes import ModelRoutes
from services.gateway.http.asgi import client_of, in_pieces, key_of, send_body
from services.gateway.http.error_forms import OpenAIErrors
from services.gateway.http.preparation import BYTES_PER_TOKEN, INLINE_BODY_BYTES, read_request
from services.gateway.http.prompts import INLINE_TOKEN_IDS, PromptLimits, PromptMaker
from services.gateway.http.request_log import REQUEST, RequestLog
from services.gateway.memory import MemoryClaim
from services.gateway.request_bodies import body as bodies
from services.gateway.request_bodies.body import required
from services.gateway.request_bodies.tokenize_request import (
    DetokenizeBody,
    TokenizeBody,
    read_tokenize_request,
    read_tokens,
)
from services.gateway.service import Gateway
from services.gateway.tokenizer import ModelTokenizer

JSON_BYTES_PER_ID = 12
"""Digits and a comma, at most."""
BYTES_PER_TOKEN_STRING = 64
"""Beside its characters: the object, and its place in a list."""
MAX_JSON_PER_BYTE = 6
"""Of text, in an answer: ``\\u0000``."""

T = TypeVar("T")
Body = TokenizeBody | DetokenizeBody


class TokenizerRoute(ABC):
    """One route as an ASGI application. Errors are raised before the first byte."""

    errors = OpenAIErrors()
    """What they look like here."""
    path: ClassVar[str]
    body_type: ClassVar[type[Body]]

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        gateway.refuse_while_draining()
        with gateway.request_memory.claim(client_of(scope)) as claim:
            raw = await read_request(gateway, scope, receive, claim)
            body = await self._run(lambda: bodies.read_body(raw, self.body_type), len(raw) > INLINE_BODY_BYTES)
            model = gateway.find_model(required(body.model, "model"))
            gateway.api_keys.check_model(key_of(scope), model.record.name)
            request: RequestLog = scope[REQUEST]
            request.model = model.record.name
            answer = await self._answer(raw, body, model, claim)
            await send_body(in_pieces(send), 200, answer)

    @abstractmethod
    async def _answer(self, raw: bytes, body: Any, model: ModelRoutes, claim: MemoryClaim) -> bytes:
        """The JSON. ``claim`` grows to what it takes to make."""

    def _maker(self, model: ModelRoutes, tokenizer: ModelTokenizer) -> PromptMaker:
        return PromptMaker(model.record, tokenizer, self._gateway.offload, self._limits(model))

    def _limits(self, model: ModelRoutes) -> PromptLimits:
        return PromptLimits.of(model.record, self._gateway.bus.max_payload_bytes)

    async def _text_bytes(self, tokenizer: ModelTokenizer, token_ids: Sequence[int]) -> int:
        return await self._run(lambda: tokenizer.text_bytes(token_ids), len(token_ids) > INLINE_TOKEN_IDS)

    async def _run(self, step: Callable[[], T], in_thread: bool) -> T:
        return await self._gateway.offload.run(step) if in_thread else step()


class Tokenize(TokenizerRoute):
    """A text, or a conversation as its model's prompt, to ids."""

    path = "/tokenize"
    body_type = TokenizeBody

    async def _answer(self, raw: bytes, body: TokenizeBody, model: ModelRoutes, claim: MemoryClaim) -> bytes:
        limits = self._limits(model)
        request = await self._run(
            lambda: read_tokenize_request(raw, body, vocab_size=limits.vocab_size, max_prompt_bytes=limits.max_bytes),
            len(raw) > INLINE_BODY_BYTES,
        )
        tokenizer = await self._gateway.tokenizers.get(model.record)
        maker, source = self._maker(model, tokenizer), request.source
        if isinstance(source, str):
            [ids] = await maker.encode([source], add_special_tokens=request.add_special_tokens, param="prompt")
        else:
            text = await maker.render(source, param="messages")
            [ids] = await maker.encode([text], add_special_tokens=source.add_special_tokens, param="messages")
        most_bytes = (BYTES_PER_TOKEN + JSON_BYTES_PER_ID) * len(ids)
        if request.return_token_strs:
            most_bytes += BYTES_PER_TOKEN_STRING * len(ids)
            most_bytes += (1 + MAX_JSON_PER_BYTE) * await self._text_bytes(tokenizer, ids)
        claim.resize(claim.num_bytes + most_bytes)
        context_tokens = self._gateway.dispatcher.context_tokens(model)

        def encoded() -> bytes:
            strings = tokenizer.token_strings(ids) if request.return_token_strs else None
            answer = {"count": len(ids), "max_model_len": context_tokens, "tokens": ids, "token_strs": strings}
            return msgspec.json.encode(answer)

        return await self._run(encoded, len(ids) > INLINE_TOKEN_IDS)


class Detokenize(TokenizerRoute):
    """Ids to text, special tokens included."""

    path = "/detokenize"
    body_type = DetokenizeBody

    async def _answer(self, raw: bytes, body: DetokenizeBody, model: ModelRoutes, claim: MemoryClaim) -> bytes:
        limits = self._limits(model)
        token_ids = await self._run(
            lambda: read_tokens(body, vocab_size=limits.vocab_size, max_bytes=limits.max_bytes),
            len(raw) > INLINE_BODY_BYTES,
        )
        tokenizer = await self._gateway.tokenizers.get(model.record)
        text_bytes = await self._text_bytes(tokenizer, token_ids)
        claim.resize(claim.num_bytes + BYTES_PER_TOKEN * len(token_ids) + (1 + MAX_JSON_PER_BYTE) * text_bytes)
        text = await self._maker(model, tokenizer).decode(token_ids)
        return await self._run(lambda: msgspec.json.encode({"prompt": text}), len(token_ids) > INLINE_TOKEN_IDS)
