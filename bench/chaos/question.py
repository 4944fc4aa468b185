"""What is asked: requests of many kinds whose answers do not depend on who computes them, nor when."""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.chaos.schema import SCHEMA

_TOKEN_IDS = range(10, 200)
"""Every model that this is run with has them."""
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PROMPT_TOKENS = ((0.65, (4, 40)), (0.25, (60, 200)), (0.1, (400, 900)))
_SHARED_TOKENS = 300
_OUTPUT_TOKENS = ((0.45, (4, 16)), (0.35, (20, 50)), (0.2, (90, 180)))
"""Shares, and ranges of tokens. Long answers are there to be hit by a kill."""
_SCHEMA_TOKENS = 400
"""Enough for nearly every answer of a random model to become whole; most take a tenth."""
_NO_BLANKS = {str(ord(blank)): -100 for blank in " \t\r\n"}
"""A bias: it would write whitespace without end, where a grammar lets it. The demo model's tokens are bytes."""
_PENALTIES = {"presence_penalty": (0.3, 1.5), "frequency_penalty": (0.1, 0.8), "repetition_penalty": (1.05, 1.4)}
_PENALIZED = (("presence_penalty",), ("frequency_penalty",), ("repetition_penalty",), tuple(_PENALTIES))
_PENALIZED_TOKENS = 60
"""At least: so many that a kill comes between."""


@dataclass(frozen=True, slots=True)
class Question:
    """A text completion with everything fixed that its answer depends on."""

    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    options: tuple[tuple[str, Any], ...]
    has_schema: bool = False
    is_open: bool = False
    """Any answer that has the schema will do."""

    @property
    def drawn(self) -> bool:
        """Its tokens are drawn, not the likeliest ones."""
        return bool(dict(self.options)["temperature"] > 0)

    @property
    def is_penalized(self) -> bool:
        """What the answer has so far counts against tokens."""
        return any(name in _PENALTIES for name, _ in self.options)

    def body(self, model: str, *, stream: bool, alone: bool = False) -> bytes:
        """The request's JSON. ``alone``: nothing that was computed before is found of it."""
        fields: dict[str, Any] = {"model": model, "prompt": self.prompt, "max_tokens": self.max_tokens}
        fields |= dict(self.options)
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if alone:
            fields["cache_salt"] = secrets.token_hex(8)
        return msgspec.json.encode(fields)


def make_questions(seed: int, count: int, *, schemas: bool = True, redraws: bool = False) -> tuple[Question, ...]:
    """Greedy and drawn ones (with a seed), of several lengths, some with stop strings, some with logprobs; with
    ``schemas`` every third one has ``SCHEMA``.

    ``redraws``: an answer that goes on elsewhere goes on with other random numbers. Then they are greedy, and every
    third one has ``SCHEMA`` or penalties in turn; of those with the schema every second one is drawn, and open.
    """
    rng = random.Random(f"questions-{seed}")
    beginning = rng.choices(_TOKEN_IDS, k=_SHARED_TOKENS)
    return tuple(_question(rng, index, beginning, schemas=schemas, redraws=redraws) for index in range(count))


def _question(rng: random.Random, index: int, beginning: list[int], *, schemas: bool, redraws: bool) -> Question:
    """Every second one begins as others do."""
    shared = beginning[: rng.randrange(_SHARED_TOKENS)] if index // 2 % 2 else []
    prompt = tuple(shared + rng.choices(_TOKEN_IDS, k=_length(rng, _PROMPT_TOKENS)))
    max_tokens = _length(rng, _OUTPUT_TOKENS)
    turn, is_third = index // 3, index % 3 == 1
    has_schema = schemas and is_third and not (redraws and turn % 2)
    is_open = has_schema and redraws and turn % 4 == 2
    options: dict[str, Any] = {"temperature": 0.0}
    if is_open or (index % 2 and not redraws):
        options = {"temperature": round(rng.uniform(0.6, 1.2), 2), "seed": rng.getrandbits(40)}
    if redraws and is_third and not has_schema:
        options |= {name: round(rng.uniform(*_PENALTIES[name]), 2) for name in _PENALIZED[turn // 2 % len(_PENALIZED)]}
        max_tokens = max(max_tokens, _PENALIZED_TOKENS)
    elif index % 2 and not redraws:
        options |= ({}, {"top_p": 0.9}, {"top_k": 40}, {"presence_penalty": 0.5})[index // 2 % 4]
    if has_schema:
        options |= {"guided_json": SCHEMA, "logit_bias": _NO_BLANKS}
        max_tokens = _SCHEMA_TOKENS
    elif index % 5 == 2:
        # Four letters of some ninety that the demo model writes: most answers end with one of them.
        options["stop"] = rng.sample(_LETTERS, 4)
    else:
        options["ignore_eos"] = True
    if index % 7 == 3:
        options["logprobs"] = 2
    return Question(index, prompt, max_tokens, tuple(options.items()), has_schema, is_open)


def _length(rng: random.Random, shares: tuple[tuple[float, tuple[int, int]], ...]) -> int:
    ((low, high),) = rng.choices([span for _, span in shares], weights=[share for share, _ in shares])
    return rng.randint(low, high)
