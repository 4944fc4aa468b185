"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``: Anthropic's."""

from __future__ import annotations

from services.gateway.http.endpoints.chat import ChatLogprobs
from services.gateway.http.formats import AnswerFormat, Reply
from services.gateway.http.logprobs import LogprobShape
from services.gateway.http.message_format import AnthropicErrors, MessageFormat
from services.gateway.http.prompts import Prompt, PromptLimits, PromptMaker
from services.gateway.request_bodies.chat_request import ChatRequest
from services.gateway.request_bodies.messages_request import MessagesBody, read_messages_request
from services.gateway.tokenizer import ModelTokenizer


class MessagesEndpoint:
    """``Endpoint``: a conversation as messages of blocks, and the next one."""

    path = "/v1/messages"
    operation = "chat"
    id_prefix = "msg_"
    prompt_param = "messages"
    length_param = "max_tokens"
    errors = AnthropicErrors()
    body_type = MessagesBody
    examples: tuple[bytes, ...] = (
        b'{"max_tokens": 1, "system": [{"type": "text", "text": "a"}], "messages": [{"role": "user", "content": "a"}]}',
        b'{"max_tokens": 1, "messages": [{"role": "assistant", "content":'
        b' [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}, {"role": "user", "content":'
        b' [{"type": "tool_result", "tool_use_id": "c", "content": "a"}]}],'
        b' "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "auto"}}',
    )

    def read(self, raw: bytes, body: MessagesBody, limits: PromptLimits) -> ChatRequest:
        return read_messages_request(raw, body, vocab_size=limits.vocab_size, max_prompt_bytes=limits.max_bytes)

    async def prompts(self, request: ChatRequest, maker: PromptMaker) -> list[Prompt]:
        return [await maker.of_chat(request, param=self.prompt_param)]

    def format(self, reply: Reply) -> AnswerFormat:
        return MessageFormat(reply)

    def logprobs(self, tokenizer: ModelTokenizer, echoed: Prompt | None = None) -> LogprobShape:  # noqa: ARG002
        return ChatLogprobs(tokenizer)


class CountTokensEndpoint(MessagesEndpoint):
    """The same conversation, of which only the tokens are counted."""

    path = "/v1/messages/count_tokens"
    examples = (b'{"messages": [{"role": "user", "content": "a"}]}',)

    def read(self, raw: bytes, body: MessagesBody, limits: PromptLimits) -> ChatRequest:
        return read_messages_request(
            raw, body, vocab_size=limits.vocab_size, max_prompt_bytes=limits.max_bytes, answered=False
        )
