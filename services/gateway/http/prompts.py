"""From text to token ids, without stalling the other streams: what is short is done on the event loop, what is long in
a thread, in steps that are short or release the interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from services.gateway.chat_template import ChatTemplate
from services.gateway.core.thoughts import Thinking
from services.gateway.model_parsers import thoughts_of, tool_parser_of
from services.gateway.offload import Offload
from services.gateway.request_bodies.body import refuse_large_text
from services.gateway.request_bodies.chat_request import ChatRequest
from services.gateway.template_sandbox import RenderingTooLarge
from services.gateway.tokenizer import ModelTokenizer
from shared.errors import BadRequest
from shared.messages.registry import ModelRecord

INLINE_CHARACTERS = 4096
"""Up to this length, all texts of a request together are encoded on the event loop (well under a millisecond)."""
INLINE_TOKEN_IDS = 4096
"""The same for token ids that become text."""
INLINE_TEMPLATE_CHARACTERS = 16_384
"""Longer conversations are rendered in a thread."""
INLINE_OPERATIONS = 20_000
INLINE_RENDER_S = 0.02
"""A template that needs more than these for a short conversation starts again in a thread."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request."""

    token_ids: tuple[int, ...]
    echo: str
    """Its text, if the output is to begin with it."""
    thinking: Thinking | None = None
    """What comes behind it; None: an answer without a thought."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a prompt may be."""

    vocab_size: int
    max_bytes: int
    """Of its text, or of its token ids at a byte each: what no message to a worker could hold."""

    @classmethod
    def of(cls, record: ModelRecord, max_bytes: int) -> PromptLimits:
        """A model's. Raises ``BadRequest`` for one that takes no text."""
        if not record.basics.vocab_size:
            raise BadRequest(
                f"model {record.name!r} is no language model: its config.json says nothing of a vocabulary",
                param="model",
            )
        return cls(record.basics.vocab_size, max_bytes)


class PromptMaker:
    """For one request."""

    def __init__(self, record: ModelRecord, tokenizer: ModelTokenizer, offload: Offload, limits: PromptLimits) -> None:
        self._record, self._tokenizer, self._offload, self._limits = record, tokenizer, offload, limits

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool, param: str) -> list[tuple[int, ...]]:
        """The ids of a request's texts. Raises ``BadRequest`` for those that the model does not have."""
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            encoded = self._tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
        else:
            encoded = await self._offload.run(self._tokenizer.encode_all, texts, add_special_tokens=add_special_tokens)
        for token_ids in encoded:
            self._refuse_unknown(token_ids, param)
        return encoded

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt of ids."""
        if len(token_ids) <= INLINE_TOKEN_IDS:
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return await self._offload.run(self._tokenizer.decode, list(token_ids), skip_special_tokens=False)

    async def of_chat(self, chat: ChatRequest, *, param: str) -> Prompt:
        """A conversation, which came as that parameter. Raises as ``render`` and ``encode``."""
        text = await self.render(chat, param=param)
        [token_ids] = await self.encode([text], add_special_tokens=chat.add_special_tokens, param=param)
        thoughts = thoughts_of(self._record, self._tokenizer)
        return Prompt(token_ids, "", thoughts.behind(text) if thoughts is not None else None)

    async def render(self, chat: ChatRequest, *, param: str) -> str:
        """A conversation, which came as that parameter, as its model's prompt. Raises ``BadRequest``, also when that
        takes too much, ``UnsupportedParameter``, and ``PayloadTooLarge``."""
        tools = chat.options.tools
        template = self._tokenizer.template if tools is None else self._tokenizer.tool_template
        if template is None:
            raise BadRequest(f"model {self._record.name!r} has no chat template; use /v1/completions", param=param)
        if tools is not None:
            tool_parser_of(self._record, self._tokenizer)
        text = await self._rendered(template, chat, param)
        refuse_large_text(text, max_bytes=self._limits.max_bytes, param=param)
        return text

    async def _rendered(self, template: ChatTemplate, chat: ChatRequest, param: str) -> str:
        whole = partial(
            template.render,
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            arguments=chat.template_arguments,
            tools=chat.options.tools.for_template if chat.options.tools is not None else (),
        )
        if chat.num_characters <= INLINE_TEMPLATE_CHARACTERS:
            with contextlib.suppress(RenderingTooLarge):
                return whole(max_operations=INLINE_OPERATIONS, max_time_s=INLINE_RENDER_S)
        try:
            return await self._offload.run(whole)
        except RenderingTooLarge as error:
            raise BadRequest(f"the model's chat template was stopped: {error}", param=param) from error

    def _refuse_unknown(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self._limits.vocab_size
        if token_ids and max(token_ids) >= vocab_size:
            raise BadRequest(
                f"{param}: the tokenizer gives token id {max(token_ids)}, the model has only 0..{vocab_size - 1}",
                param=param,
            )
