"""What reads the answers of a model: as its settings say, else as its chat template does."""

from __future__ import annotations

from services.gateway.core.thoughts import ThoughtFormat, chosen_format
from services.gateway.core.tools.families import chosen_family
from services.gateway.core.tools.parser import ToolParser
from services.gateway.tokenizer import ModelTokenizer
from shared.errors import UnsupportedParameter
from shared.messages.registry import ModelRecord


def tool_parser_of(record: ModelRecord, tokenizer: ModelTokenizer) -> type[ToolParser]:
    """Of the calls. Raises ``UnsupportedParameter`` for a model whose calls are not read."""
    template = tokenizer.tool_template
    found = chosen_family(record.tool_parser, template.tool_parser if template is not None else None)
    if found is not None:
        return found
    if record.tool_parser == "none":
        raise UnsupportedParameter(f"tools: model {record.name!r} has no tool parser (it is none)", param="tools")
    raise UnsupportedParameter(
        f"tools: the chat template of model {record.name!r} has no tools, or calls of a format that is not supported "
        "(its tool parser may be set)",
        param="tools",
    )


def thoughts_of(record: ModelRecord, tokenizer: ModelTokenizer) -> ThoughtFormat | None:
    """How it thinks. None: it does not, or in a format that is not read."""
    template = tokenizer.template or tokenizer.tool_template
    return chosen_format(record.reasoning_parser, template.thoughts if template is not None else None)
