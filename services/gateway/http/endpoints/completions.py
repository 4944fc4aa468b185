"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any

from services.gateway.http.chunks import ChunkedFormat
from services.gateway.http.error_forms import OpenAIErrors
from services.gateway.http.formats import AnswerFormat, ChoiceResult, Reply
from services.gateway.http.logprobs import LogprobShape, finite, packed
from services.gateway.http.prompts import Prompt, PromptLimits, PromptMaker
from services.gateway.request_bodies.completion_request import (
    CompletionBody,
    CompletionRequest,
    read_completion_request,
)
from services.gateway.tokenizer import ModelTokenizer
from shared.messages.generation import TokenLogprobs


class CompletionEndpoint:
    """``Endpoint``: texts or token ids, and how each goes on."""

    path = "/v1/completions"
    operation = "text_completion"
    id_prefix = "cmpl-"
    prompt_param = "prompt"
    length_param = "max_tokens"
    errors = OpenAIErrors()
    body_type = CompletionBody
    examples = (b'{"prompt": "a"}', b'{"prompt": [0]}')

    def read(self, raw: bytes, body: CompletionBody, limits: PromptLimits) -> CompletionRequest:
        return read_completion_request(raw, body, vocab_size=limits.vocab_size, max_prompt_bytes=limits.max_bytes)

    async def prompts(self, request: CompletionRequest, maker: PromptMaker) -> list[Prompt]:
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        encoded = iter(
            await maker.encode(texts, add_special_tokens=request.add_special_tokens, param=self.prompt_param)
        )
        prompts = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                prompts.append(Prompt(next(encoded), prompt if request.echo else ""))
            else:
                prompts.append(Prompt(prompt, await maker.decode(prompt) if request.echo else ""))
        return prompts

    def format(self, reply: Reply) -> AnswerFormat:
        return CompletionFormat(reply)

    def logprobs(self, tokenizer: ModelTokenizer) -> LogprobShape:
        return CompletionLogprobs(tokenizer)


class CompletionFormat(ChunkedFormat):
    """Texts."""

    whole_object = chunk_object = "text_completion"
    around_text = (b'"text":', b"")

    def choice_json(self, index: int, result: ChoiceResult) -> dict[str, Any]:
        return {
            "index": index,
            "text": result.text,
            "logprobs": result.logprobs,
            "finish_reason": result.finish.reason,
        }


class CompletionLogprobs:
    """``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}``; offsets count shown characters."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def entry(self, token_id: int, logprobs: TokenLogprobs, text: str) -> Any:
        offset = self._offset
        self._offset += len(text)
        top = {self._text(other): finite(value) for other, value in logprobs.top}
        token = self._text(token_id)
        top.setdefault(token, finite(logprobs.logprob))
        return token, finite(logprobs.logprob), packed(top), offset

    def join(self, entries: list[Any]) -> dict[str, Any]:
        return {
            "tokens": [entry[0] for entry in entries],
            "token_logprobs": [entry[1] for entry in entries],
            "top_logprobs": [entry[2] for entry in entries],
            "text_offset": [entry[3] for entry in entries],
        }
