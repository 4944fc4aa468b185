"""What a ``Grammar`` means to llguidance: its text there, and what it may cost.

Gateway and worker build a grammar from the same text under the same limits, so that what one accepts the other can
follow. Nothing here needs llguidance.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from shared.messages.generation import Grammar

ANSWER = "@answer"
"""In ``Grammar.before``: the grammar itself."""
OPTIONS_KEYWORD = "x-guidance"
"""With which a schema would set llguidance's options, which are ours to set."""
OPTIONS = {"coerce_one_of": True}
"""The gateway passes a ``oneOf`` only where no two of its alternatives can both hold."""
_NOT_IN_LITERALS = re.compile(r"\\(.)|([/\n\r])", re.DOTALL)
_ESCAPES = {"/": "\\/", "\n": "\\n", "\r": "\\r"}


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What compiling a grammar, and each mask, may cost: llguidance's limits by their names there.

    Measured with 128k tokens: ordinary masks take 0.1 ms, a few 3 to 5 ms; what meets a limit has taken about 10 ms.
    ``\\w`` is all letters of Unicode: an address with a few of them needs up to 100,000 fuel at first. 10,000 states
    are 10 to 20 MB."""

    max_items_in_row: int
    initial_lexer_fuel: int = 100_000
    step_lexer_fuel: int = 100_000
    step_max_items: int = 10_000
    max_lexer_states: int = 10_000
    max_grammar_size: int = 50_000


_LIMITS = {"lark": GrammarLimits(max_items_in_row=250), "calls": GrammarLimits(max_items_in_row=1100)}
"""A row of an ambiguous grammar costs its items and is as long as what was written; a schema's rows are long where
objects have many optional members, four items each."""
_OTHER_LIMITS = GrammarLimits(max_items_in_row=1000)


def limits_of(grammar: Grammar) -> GrammarLimits:
    """The same at the gateway and in the worker."""
    return _LIMITS.get(grammar.kind, _OTHER_LIMITS)


def llguidance_text(grammar: Grammar) -> str:
    """The grammar as llguidance reads it. Raises ``ValueError`` for a text that is not of its kind."""
    answer = _TEXTS[grammar.kind](grammar.text)
    if not grammar.before:
        return json.dumps({"grammars": [answer]})
    return json.dumps({"grammars": [{"lark_grammar": grammar.before}, {"name": ANSWER[1:], **answer}]})


def _of_schema(text: str) -> dict[str, Any]:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    return {"json_schema": {**schema, OPTIONS_KEYWORD: OPTIONS}}


def _of_regex(text: str) -> dict[str, Any]:
    return {"lark_grammar": f"start: /{_NOT_IN_LITERALS.sub(_escaped, text) or '(?:)'}/"}


def _escaped(match: re.Match[str]) -> str:
    character: str = match[1] or match[2]
    return _ESCAPES.get(character) or match[0]


def _of_choice(text: str) -> dict[str, Any]:
    # One terminal: alternatives of a rule would each cost an item of every row.
    return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(_literal, json.loads(text)))}


def _literal(choice: object) -> str:
    if not isinstance(choice, str):
        raise ValueError("a choice must be a string")
    return json.dumps(choice).replace("\x7f", "\\u007f")


def _of_lark(text: str) -> dict[str, Any]:
    return {"lark_grammar": text}


_TEXTS = {"json_schema": _of_schema, "regex": _of_regex, "choice": _of_choice, "lark": _of_lark, "calls": _of_lark}
