"""What the benchmarks read of the OpenAI API: models, and the events of a streamed completion."""

from __future__ import annotations

import msgspec

DONE = b"[DONE]"


class Choice(msgspec.Struct, frozen=True):
    """A piece of one completion."""

    text: str = ""
    finish_reason: str | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the tokens of a prompt."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the server counts them."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed; 0 where the server tells nothing of them."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details is not None else 0


class ErrorBody(msgspec.Struct, frozen=True):
    """An OpenAI error."""

    message: str = ""
    code: str | int | None = None


class CompletionEvent(msgspec.Struct, frozen=True):
    """One ``data:`` line."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: ErrorBody | None = None


class ModelCard(msgspec.Struct, frozen=True):
    """A served model; ``max_model_len`` is prompt plus output in tokens, where the server tells it."""

    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True):
    """``GET /v1/models``."""

    data: tuple[ModelCard, ...]


class StreamOptions(msgspec.Struct, frozen=True):
    """Asks for the final usage event."""

    include_usage: bool = True


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A streamed completion of exactly ``max_tokens`` tokens."""

    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    temperature: float
    stream: bool
    stream_options: StreamOptions

    @classmethod
    def exactly(cls, model: str, prompt: tuple[int, ...], output_tokens: int) -> CompletionRequest:
        """Greedy, and neither shorter nor longer than ``output_tokens``."""
        return cls(
            model=model,
            prompt=prompt,
            max_tokens=output_tokens,
            min_tokens=output_tokens,
            ignore_eos=True,
            temperature=0.0,
            stream=True,
            stream_options=StreamOptions(),
        )


_event_decoder = msgspec.json.Decoder(CompletionEvent)
_models_decoder = msgspec.json.Decoder(ModelList)
_encoder = msgspec.json.Encoder()


def read_event(data: bytes) -> CompletionEvent:
    """The event in ``data``. Raises ``msgspec.MsgspecError`` when it is none."""
    return _event_decoder.decode(data)


def read_models(body: bytes) -> ModelList:
    """The answer of ``/v1/models``. Raises ``msgspec.MsgspecError`` when it is none."""
    return _models_decoder.decode(body)


def write_request(request: CompletionRequest) -> bytes:
    """The request's JSON."""
    return _encoder.encode(request)
