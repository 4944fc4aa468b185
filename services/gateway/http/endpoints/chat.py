"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.http.chunks import ChunkedFormat
from services.gateway.http.error_forms import OpenAIErrors
from services.gateway.http.formats import AnswerFormat, ChoiceResult, MadeCall, Reply
from services.gateway.http.logprobs import LogprobShape, finite, packed
from services.gateway.http.prompts import Prompt, PromptLimits, PromptMaker
from services.gateway.request_bodies.chat_request import ChatBody, ChatRequest, read_chat_request
from services.gateway.tokenizer import ModelTokenizer
from shared.messages.generation import TokenLogprobs


class ChatEndpoint:
    """``Endpoint``: a conversation, and its next message."""

    path = "/v1/chat/completions"
    operation = "chat"
    id_prefix = "chatcmpl-"
    prompt_param = "messages"
    length_param = "max_tokens"
    errors = OpenAIErrors()
    body_type = ChatBody
    examples = (
        b'{"messages": [{"role": "user", "content": "a"}]}',
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],'
        b' "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}',
    )

    def read(self, raw: bytes, body: ChatBody, limits: PromptLimits) -> ChatRequest:
        return read_chat_request(raw, body, vocab_size=limits.vocab_size, max_prompt_bytes=limits.max_bytes)

    async def prompts(self, request: ChatRequest, maker: PromptMaker) -> list[Prompt]:
        return [await maker.of_chat(request, param=self.prompt_param)]

    def format(self, reply: Reply) -> AnswerFormat:
        return ChatFormat(reply)

    def logprobs(self, tokenizer: ModelTokenizer, echoed: Prompt | None = None) -> LogprobShape:  # noqa: ARG002
        return ChatLogprobs(tokenizer)


class ChatFormat(ChunkedFormat):
    """Messages, and what a stream adds to them."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    around_text = (b'"delta":{"content":', b"}")
    opening = b'"delta":{"role":"assistant","content":""}'

    def rest_json(self, results: Sequence[ChoiceResult]) -> dict[str, Any]:
        listed = results[0].prompt_logprobs  # the prompt of all
        return {} if listed is None else {"prompt_logprobs": listed}

    def choice_json(self, index: int, result: ChoiceResult) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
        if result.calls:
            message["content"] = result.text or None
            message["tool_calls"] = [_call_json(call) for call in result.calls]
        if result.thought:
            # Both names, as in chunks.
            message["content"] = result.text or None
            message["reasoning_content"] = message["reasoning"] = result.thought
        return {
            "index": index,
            "message": message,
            "logprobs": result.logprobs,
            "finish_reason": self.finish_reason(result.finish),
        }


def _call_json(call: MadeCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


class ChatLogprobs:
    """``{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}``."""

    has_more = False

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}

    def entry(self, token_id: int, logprobs: TokenLogprobs, text: str) -> Any:  # noqa: ARG002 - the other shape's
        own = self._token(token_id, logprobs.logprob)
        return packed({**own, "top_logprobs": [self._token(other, value) for other, value in logprobs.top]})

    def join(self, entries: list[Any]) -> dict[str, Any]:
        return {"content": entries}
