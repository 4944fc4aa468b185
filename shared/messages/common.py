"""Small structs that several messages embed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.errors import BlitzError, error_from_code
from shared.messages.codec import Message
from shared.model_spec import MAX_LAYERS
from shared.subjects import Process

MAX_COUNT = 2**53
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""What is counted. Bounded, as all that follows: sums of what was reported stay numbers, and no message makes
its reader believe in a figure that cannot have been measured."""
Figure = Annotated[float, Meta(ge=0.0, le=1e18)]
"""A measured figure, or a time; nothing that is not a number."""
SignedCount = Annotated[int, Meta(ge=-(2**53), le=2**53)]
SignedFigure = Annotated[float, Meta(ge=-1e18, le=1e18)]
LayerIndex = Annotated[int, Meta(ge=-1, lt=MAX_LAYERS)]
"""-1: of no layer."""
WaitSeconds = Annotated[float, Meta(ge=0.0, le=3600.0)]
LeaseSeconds = Annotated[float, Meta(gt=0.0, le=3600.0)]

Role = Literal["colocated", "prefill", "decode"]
TAKES_PROMPTS: frozenset[Role] = frozenset({"colocated", "prefill"})
"""Roles whose instances take requests from gateways and compute prompts. They may scale live: prompts can be shared."""
NEEDS_DECODER: frozenset[Role] = frozenset({"prefill"})
"""Of these, the roles whose requests another instance is to decode."""
DECODES_FOR_OTHERS: frozenset[Role] = frozenset({"decode"})
"""Roles whose instances take requests from those."""
Serving = Literal["", "colocated", "disaggregated"]
"""How a model is served. ``""``: by colocated instances, and by those of other roles that were asked for by hand.
``colocated``, ``disaggregated``: the load decides on the roles below, and instances of others are surplus."""
SERVED_BY: Mapping[Serving, frozenset[Role]] = {
    "": frozenset({"colocated"}),
    "colocated": frozenset({"colocated"}),
    "disaggregated": frozenset({"prefill", "decode"}),
}
"""Roles of which a model that is served so keeps its minimum."""


def is_scaled_by_load(serving: Serving, role: Role) -> bool:
    """Whether the monitor asks for as many instances of a role as the load needs: none, if the model is not served by
    it. Of others it asks for as many as were asked for by hand."""
    return bool(serving) or role == "colocated"


ToolParserName = Literal["auto", "hermes", "llama3_json", "mistral", "none", "pythonic"]
"""What reads the calls that a model writes, by vLLM's names. ``auto``: as its chat template has them; ``none``:
nothing, and functions are refused."""
ReasoningParserName = Literal["auto", "deepseek_r1", "none", "qwen3"]
"""What tells a model's thought from its answer, by vLLM's names. ``auto``: as its chat template has thoughts; ``none``:
nothing, and whatever it writes is its answer."""
InstanceState = Literal["spare", "loading", "live", "serving", "draining", "failed"]
KindName = Annotated[str, Meta(min_length=1, max_length=64)]
"""Of an engine or a device. Text, for others may know more of them than a reader does; who needs to know one checks."""
LivePolicy = Literal["zigzag", "best_effort", "overlap", "stop_the_world"]
"""``shared.zigzag.queue.Policy``, by value."""
LiveChoice = Literal["auto", "always", "never"]
"""Whether a scale operation makes pairs. ``auto``: where loading first and serving then would break the SLO."""


class Ack(Message, frozen=True, kw_only=True, tag="ack.v1"):
    """Done; nothing to say."""


class AtWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Something at one worker, as long as that process lives."""

    worker_id: str
    incarnation: str
    """Of the worker's process."""

    @property
    def worker(self) -> Process:
        """Whom to speak to about it."""
        return Process(self.worker_id, self.incarnation)


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A typed error inside a message (``shared.errors`` code and text)."""

    code: str
    message: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: BlitzError) -> ErrorInfo:
        return cls(code=error.code, message=error.message, retry_after_s=error.retry_after_s)

    def as_error(self) -> BlitzError:
        return error_from_code(self.code, self.message, retry_after_s=self.retry_after_s)
