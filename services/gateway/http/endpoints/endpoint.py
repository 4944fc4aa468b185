"""What a generating endpoint is: how its body is read, what becomes of it as prompts, and how its answer looks.

``http.generation`` serves any of them, and asks nothing about which one it is.
"""

from __future__ import annotations

from typing import Any, Protocol

from services.gateway.http.error_forms import ErrorForm
from services.gateway.http.formats import AnswerFormat, Reply
from services.gateway.http.logprobs import LogprobShape
from services.gateway.http.prompts import Prompt, PromptLimits, PromptMaker
from services.gateway.request_bodies.options import Options, SharedBody
from services.gateway.tokenizer import ModelTokenizer


class GenerationRequest(Protocol):
    """A checked request."""

    @property
    def options(self) -> Options: ...

    @property
    def repeated(self) -> bytes:
        """What the answer repeats of it, as the endpoint's ``format`` takes it; of most endpoints nothing."""


class Endpoint(Protocol):
    """One, for all of its requests. Any thread."""

    path: str
    operation: str
    """By OpenTelemetry's conventions for generative AI."""
    id_prefix: str
    """Of a response's id."""
    prompt_param: str
    """The parameter that prompts come from."""
    length_param: str
    """The parameter that says how long an output may be."""

    @property
    def errors(self) -> ErrorForm:
        """What errors look like, also those before a request is read."""

    @property
    def body_type(self) -> type[SharedBody]: ...

    @property
    def examples(self) -> tuple[bytes, ...]:
        """Small bodies, which between them use each decoder that the usual ones need."""

    def read(self, raw: bytes, body: Any, limits: PromptLimits) -> GenerationRequest:
        """The body, which is of ``body_type``, checked. Raises ``BadRequest``, ``UnsupportedParameter`` and
        ``PayloadTooLarge``, naming the parameter."""

    async def prompts(self, request: Any, maker: PromptMaker) -> list[Prompt]:
        """Of a request that ``read`` gave, each of which gets its ``n`` choices. Raises as ``read`` does."""

    def format(self, reply: Reply) -> AnswerFormat:
        """Of one response."""

    def logprobs(self, tokenizer: ModelTokenizer, echoed: Prompt | None = None) -> LogprobShape:
        """Of one choice. ``echoed``: the prompt that its text begins with, whose tokens' come first; then it is a
        ``PromptTaker``."""
