"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from services.gateway.http.chunks import ChunkedFormat
from services.gateway.http.error_forms import OpenAIErrors
from services.gateway.http.formats import AnswerFormat, ChoiceResult, Reply
from services.gateway.http.logprobs import LogprobShape, entry_bytes, finite, packed
from services.gateway.http.prompt_logprobs import PromptTaker, PromptToken
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

    def logprobs(self, tokenizer: ModelTokenizer, echoed: Prompt | None = None) -> LogprobShape:
        return CompletionLogprobs(tokenizer) if echoed is None else EchoedLogprobs(tokenizer, echoed)


class CompletionFormat(ChunkedFormat):
    """Texts."""

    whole_object = chunk_object = "text_completion"
    around_text = (b'"text":', b"")

    def choice_json(self, index: int, result: ChoiceResult) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": result.text,
            "logprobs": result.logprobs,
            "finish_reason": result.finish.reason,
        }
        if result.prompt_logprobs is not None:
            choice["prompt_logprobs"] = result.prompt_logprobs
        return choice


class CompletionLogprobs:
    """``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}``; offsets count shown characters."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    @property
    def has_more(self) -> bool:
        return False

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def entry(self, token_id: int, logprobs: TokenLogprobs, text: str) -> Any:
        offset = self._offset
        self._offset += len(text)
        return self._entry(token_id, logprobs.logprob, logprobs.top, offset)

    def _entry(self, token_id: int, logprob: float, top: Iterable[tuple[int, float]], offset: int) -> Any:
        shown = {self._text(other): finite(value) for other, value in top}
        token = self._text(token_id)
        shown.setdefault(token, finite(logprob))
        return token, finite(logprob), packed(shown), offset

    def join(self, entries: list[Any]) -> dict[str, Any]:
        return {
            "tokens": [entry[0] for entry in entries],
            "token_logprobs": [entry[1] for entry in entries],
            "top_logprobs": [entry[2] for entry in entries],
            "text_offset": [entry[3] for entry in entries],
        }


class EchoedLogprobs(CompletionLogprobs, PromptTaker):
    """With those of a prompt before the choice's own. The first token has none."""

    def __init__(self, tokenizer: ModelTokenizer, prompt: Prompt) -> None:
        super().__init__(tokenizer)
        self._prompt = prompt
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        self._before: list[Any] = [(self._text(prompt.token_ids[0]), None, None, 0)]
        self._shown = self._end_of(prompt.token_ids[0], 0)
        self._offset = len(prompt.echo)

    @property
    def has_more(self) -> bool:
        return bool(self._before)

    def take(self, tokens: Sequence[PromptToken]) -> int:
        made = [self._prompt_entry(token) for token in tokens]
        self._before += made
        return sum(map(entry_bytes, made))

    def join(self, entries: list[Any]) -> dict[str, Any]:
        before, self._before = self._before, []
        return super().join([*before, *entries])

    def _prompt_entry(self, token: PromptToken) -> Any:
        token_id, offset = self._prompt.token_ids[token.position], self._shown
        self._shown = self._end_of(token_id, offset)
        return self._entry(token_id, token.logprob, token.top, offset)

    def _end_of(self, token_id: int, offset: int) -> int:
        """Where the prompt's text goes on. Tokens that were put before it, and spaces that belong to them, are not in
        it."""
        text = self._detokenizer.push(token_id)
        for shown in (text, text.lstrip(" ")):
            if self._prompt.echo.startswith(shown, offset):
                return offset + len(shown)
        return offset
