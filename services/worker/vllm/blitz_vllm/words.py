"""What the worker and vLLM's process say to each other, in frames: four bytes of length (big endian), then msgpack.

The worker listens on a unix socket in a directory of its own; the process connects, says that vLLM is imported, and is
told what to serve. The end of the connection is the end of the process.
"""

from __future__ import annotations

import msgspec

MAX_FRAME_BYTES = 64 << 20
LENGTH_BYTES = 4
NUM_OUTPUT = "blitz_num_output"
"""In vLLM's ``SamplingParams.extra_args``: so many of the prompt's last tokens are output."""


class Tokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """Of which masks are."""

    file: str
    """``tokenizer.json``."""
    sha256: str
    """Of its content, as it was registered. Empty: there is none."""
    end_ids: tuple[int, ...]
    """Tokens that end an answer."""


class GuideWord(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar."""

    text: str
    """As llguidance reads it."""
    limits: dict[str, int]
    """llguidance's, by their names there."""
    min_tokens: int = 0
    """The answer, with what was put out before, may not end before, unless nothing else is left."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the request, besides."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens, by vLLM's names. All counts are of what is still to come."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Those that end an answer of the model among them, where the request heeds them."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


# --- the worker's words --------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Serve this model."""

    path: str
    """Its directory: configuration, and weights unless ``weights`` says where they come from."""
    arguments: dict[str, int | float | str | bool]
    """Of vLLM's ``AsyncEngineArgs``, from a short list of names that the worker has checked."""
    weights: str
    """The socket at which the worker gives the weights to vLLM's loader (``weights_source.py``). Empty: it starts with
    some that mean nothing, and ``Refill`` brings others."""
    vocab_size: int
    """As it was registered: no token of a prompt is beyond it."""
    tokenizer: Tokenizer


class Refill(msgspec.Struct, frozen=True, kw_only=True, tag="refill"):
    """Take other weights of the same names, shapes and configuration. No request is running."""

    weights: str
    """As in ``Start``."""
    early: bool = False
    """``Opened`` says that it takes requests: their passes wait for what has not come. ``FinishRefill`` tells that
    all of the weights have been taken."""


class FinishRefill(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """After an early ``Refill``."""


class AskWell(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """Whether it is well: ``Well`` says so."""


class Add(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """Go on with this text."""

    id: str
    token_ids: tuple[int, ...]
    """Prompt and, behind it, what was put out before."""
    num_output: int = 0
    """So many of the last of them are output: penalties count them as such."""
    sampling: Sampling
    cache_salt: str = ""
    guide: GuideWord | None = None
    """The grammar that prompt's output and what is to come follow."""
    alone: bool = False
    """No other is there. ``Alone`` says when no step of others runs any more, and this one begins."""


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """Its tokens are not wanted any more."""

    id: str


# --- the process's words -------------------------------------------------------------------------


class Imported(msgspec.Struct, frozen=True, kw_only=True, tag="imported"):
    """vLLM can be used. ``lacks``: names of it that this version needs and does not find; empty if all is well."""

    version: str
    lacks: tuple[str, ...] = ()

    @property
    def refusal(self) -> str:
        """Why it cannot; empty if it can."""
        return f"vLLM {self.version} has no {', '.join(self.lacks)}" if self.lacks else ""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """It takes requests."""

    context_tokens: int
    num_blocks: int
    block_size: int
    seconds: float
    refills: bool = False
    """``Refill`` brings what a start does."""


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """It takes requests, and weights."""


class Filled(msgspec.Struct, frozen=True, kw_only=True, tag="filled"):
    """It has the other weights, and takes requests again."""

    seconds: float


class Well(msgspec.Struct, frozen=True, kw_only=True, tag="well"):
    """It takes requests, still."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """It serves nothing, or nothing any more; it ends."""

    reason: str
    is_final: bool = False
    """The next one would say the same of this model with these arguments."""


class Alone(msgspec.Struct, frozen=True, kw_only=True, tag="alone"):
    """What vLLM computes from now on is of this request."""

    id: str


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of a token, and of the likeliest, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of a request. One of them has a ``finish``: ``stop``, ``length``, or ``error``."""

    id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] | None = None
    finish: str = ""
    error: str = ""
    refused: bool = False
    """vLLM would not begin it, and another one would not either."""
    cached_tokens: int = 0


class PromptScores(msgspec.Struct, frozen=True, kw_only=True, tag="scores"):
    """Log-probabilities of the next tokens of a request's prompt, before its first output. Arrays of little-endian
    numbers of 4 bytes, row after row."""

    id: str
    start: int
    """Position of the first of them, at least 1."""
    num_top: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes


class Outputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    """What a step brought."""

    outputs: tuple[Output, ...]


class EngineStep(msgspec.Struct, frozen=True, array_like=True):
    """Of all layers."""

    prompt_tokens: int
    """That were computed."""
    decodes: int
    seconds: float


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Of the engine now, and counters over its life."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """0 to 1."""
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    preemptions_total: int = 0
    num_steps: int = 0
    steps: tuple[EngineStep, ...] = ()
    """The newest since this was said last, as far as their times can be told."""


ToProcess = Start | Refill | FinishRefill | AskWell | Add | Leave
ToWorker = Imported | Started | Opened | Filled | Well | Alone | Failed | PromptScores | Outputs | EngineLoad

_encoder = msgspec.msgpack.Encoder()
to_process = msgspec.msgpack.Decoder(ToProcess)
to_worker = msgspec.msgpack.Decoder(ToWorker)


def frame(word: msgspec.Struct) -> bytes:
    """A word as it is sent. Raises ``ValueError`` for one that is too long."""
    data = _encoder.encode(word)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"{type(word).__name__} of {len(data)} bytes: at most {MAX_FRAME_BYTES}")
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def length_of(header: bytes) -> int:
    """Of the data that follows. Raises ``ValueError`` for more than there may be."""
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes: at most {MAX_FRAME_BYTES}")
    return length
