"""Whether a grammar can be followed, by llguidance itself: without a model's tokens, which only its workers need."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.errors import BadRequest
from shared.grammars import limits_of, llguidance_text
from shared.messages.generation import Grammar

MAX_REASON_CHARACTERS = 300
_STEPS = 3
"""Behind an object's bracket all of its members may come."""
_VISIBLE = (1 << 0x7F) - (1 << 0x21)
"""Of the mask of bytes."""
_NUM_REMEMBERED = 64
"""Grammars of at most 64 KiB that were found to be well; those of one client are often the same."""


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    """A vocabulary of the 256 bytes."""
    return LLTokenizer("byte")


@lru_cache(maxsize=_NUM_REMEMBERED)
def why_not(grammar: Grammar) -> str:
    """Why no answer can follow it; empty if one can. Takes up to 100 ms, in which the interpreter is free."""
    try:
        text = llguidance_text(grammar)
    except (ValueError, RecursionError) as error:
        return str(error)
    limits = LLParserLimits(**asdict(limits_of(grammar)), precompute_large_lexemes=False, verbose_errors=False)
    matcher = LLMatcher(_bytes(), text, log_level=0, limits=limits)
    # What is wrong may show only when something is written.
    for _ in range(_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & _VISIBLE
        if matcher.is_error() or matcher.is_stopped() or not mask:
            break
        matcher.consume_token((mask & -mask).bit_length() - 1)
    why = matcher.get_error().replace("<non-verbose/>", "").strip().partition("\n")[0]
    return why if len(why) <= MAX_REASON_CHARACTERS else why[:MAX_REASON_CHARACTERS] + "..."


def check_grammar(grammar: Grammar, param: str) -> None:
    """Raises ``BadRequest`` naming ``param``."""
    why = why_not(grammar)
    if why:
        raise BadRequest(f"{param}: no answer can follow this: {why}", param=param)
