"""Which family's calls a model writes."""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.core.tools.hermes import HermesParser
from services.gateway.core.tools.llama import LlamaParser
from services.gateway.core.tools.mistral import MistralParser
from services.gateway.core.tools.parser import ToolParser
from services.gateway.core.tools.pythonic import PythonicParser
from shared.messages.common import ToolParserName

_NAMED: Mapping[ToolParserName, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
_OTHERS = ("<function=", "<arg_key>", "<parameter=")
"""Of formats that begin like one of these families', but are none."""
_SIGNS: tuple[tuple[str, type[ToolParser]], ...] = (
    ("[TOOL_CALLS]", MistralParser),
    ("<tool_call>", HermesParser),
    ("func_name1(", PythonicParser),
    ("<|python_tag|>", LlamaParser),
    ('"parameters": ', LlamaParser),
)
"""What only a family's templates have in them, the first that is found: the format that they ask for, or write."""


def family_of(template: str) -> type[ToolParser] | None:
    """The parser for a model with such a chat template; None for one without tools, or with a format unknown here."""
    if "tools" not in template or any(other in template for other in _OTHERS):
        return None
    return next((parser for sign, parser in _SIGNS if sign in template), None)


def chosen_family(name: ToolParserName, found: type[ToolParser] | None) -> type[ToolParser] | None:
    """The parser that a model's setting names; ``found``: what its template says (``family_of``)."""
    return found if name == "auto" else _NAMED.get(name)
