"""``POST /v1/responses``: OpenAI's, without anything stored."""

from __future__ import annotations

from services.gateway.http.endpoints.chat import ChatLogprobs
from services.gateway.http.formats import AnswerFormat, Reply
from services.gateway.http.logprobs import LogprobShape
from services.gateway.http.prompts import Prompt, PromptLimits, PromptMaker
from services.gateway.http.response_format import ResponsesFormat, ResponseStreamErrors
from services.gateway.request_bodies.chat_request import ChatRequest
from services.gateway.request_bodies.responses_request import ResponsesBody, read_responses_request
from services.gateway.tokenizer import ModelTokenizer


class ResponsesEndpoint:
    """``Endpoint``: a conversation as items, and the items that come next."""

    path = "/v1/responses"
    operation = "chat"
    id_prefix = "resp_"
    prompt_param = "input"
    length_param = "max_output_tokens"
    errors = ResponseStreamErrors()
    body_type = ResponsesBody
    examples = (
        b'{"input": "a"}',
        b'{"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},'
        b' {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},'
        b' {"type": "function_call_output", "call_id": "c", "output": "a"}],'
        b' "tools": [{"type": "function", "name": "f"}], "tool_choice": "auto"}',
    )

    def read(self, raw: bytes, body: ResponsesBody, limits: PromptLimits) -> ChatRequest:
        return read_responses_request(raw, body, vocab_size=limits.vocab_size, max_prompt_bytes=limits.max_bytes)

    async def prompts(self, request: ChatRequest, maker: PromptMaker) -> list[Prompt]:
        return [await maker.of_chat(request, param=self.prompt_param)]

    def format(self, reply: Reply) -> AnswerFormat:
        return ResponsesFormat(reply)

    def logprobs(self, tokenizer: ModelTokenizer, echoed: Prompt | None = None) -> LogprobShape:  # noqa: ARG002
        return ChatLogprobs(tokenizer)
