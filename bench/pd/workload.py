"""What is asked: long prompts, which arrive beside short ones with long answers. And how fast the mock is. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.replay.plan import prompt_of
from shared.errors import BadRequest

TOKEN_IDS = range(10, 250)
KV_SHARE = 0.105
"""What the KV of a prompt takes on the link, of the time of its prefill: Llama-3-8B has 128 KiB of KV per token,
computes some 10,000 prompt tokens per second, and sends over 100 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the mock engine plays, four times as slow as the case that it keeps the proportions of."""

    mib: int = 64
    layers: int = 8
    kv_bytes_per_token: int = 8 * 1024
    layer_base_ms: float = 3.0
    """A decode step takes 24 ms and a little for each request."""
    layer_per_token_us: float = 50.0
    """2,500 prompt tokens per second."""

    @property
    def tokens_per_s(self) -> float:
        """Of prompts, without what each step takes anyway."""
        return 1e6 / (self.layers * self.layer_per_token_us)


@dataclass(frozen=True, slots=True)
class Setting:
    """Two runs of one setting ask the same at the same times."""

    workers: int = 4
    seconds: float = 25.0
    long_per_s: float = 1.2
    long_tokens: int = 2000
    """Of each long prompt, a fifth more or less."""
    long_output: int = 32
    chats_per_s: float = 3.0
    """Short prompts with long answers."""
    chat_tokens: int = 64
    chat_output: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if self.workers < 2 or self.workers % 2:
            raise BadRequest(f"half of the workers prefill: an even number, not {self.workers}", param="workers")
        for name in ("seconds", "long_per_s", "chats_per_s"):
            if not 0 < getattr(self, name) < 10_000:
                raise BadRequest(f"{name} must be positive, not {getattr(self, name)}", param=name)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. ``at_s`` since the run's begin."""

    at_s: float
    number: int
    long: bool
    prompt: tuple[int, ...]
    output_tokens: int


def make_arrivals(setting: Setting) -> tuple[Arrival, ...]:
    """In the order of time: Poisson arrivals of both kinds."""
    draw = random.Random(setting.seed)
    asked: list[tuple[float, bool]] = []
    for per_s, long in ((setting.long_per_s, True), (setting.chats_per_s, False)):
        at_s = draw.expovariate(per_s)
        while at_s < setting.seconds:
            asked.append((at_s, long))
            at_s += draw.expovariate(per_s)
    arrivals = []
    for number, (at_s, long) in enumerate(sorted(asked)):
        length = round(setting.long_tokens * draw.uniform(0.8, 1.2)) if long else setting.chat_tokens
        prompt = prompt_of(setting.seed, number, length, token_ids=TOKEN_IDS)
        arrivals.append(Arrival(at_s, number, long, prompt, setting.long_output if long else setting.chat_output))
    return tuple(arrivals)


def link_gbps(model: Model, tokens_per_s: float, share: float) -> float:
    """The goodput at which KV takes ``share`` of the time of prefill at ``tokens_per_s``."""
    return model.kv_bytes_per_token * tokens_per_s * 8 / share / 1e9
