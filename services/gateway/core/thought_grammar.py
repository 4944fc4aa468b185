"""Grammars of answers behind a thought, where a model thinks: the thought is as it likes, what is behind it as asked
for."""

from __future__ import annotations

import json
from collections.abc import Mapping

from msgspec import structs

from services.gateway.core.thoughts import Thinking
from shared.grammars import ANSWER
from shared.messages.generation import Grammar


def behind_thought(grammar: Grammar, thinking: Thinking, marks: Mapping[str, int]) -> Grammar:
    """``marks``: those of the thought's beginning and end that are tokens, by their text. They may also be written as
    text: what the client gets is read from that.

    ``open`` and ``thought`` are lazy: they end with the first mark, whatever else the grammar of the answer would take.
    """
    format_, is_open = thinking
    begin, end = (marks.get(text) for text in (format_.begin, format_.end))
    thought = "thought" if end is None else f"(thought | TEXT? <[{end}]>)"
    if is_open:
        # Some models write again what the prompt ends with.
        start = thought if begin is None else f"<[{begin}]>? {thought}"
        start = f"start: {start} gap? {ANSWER}"
    else:
        opened = "open" if begin is None else f"(open | <[{begin}]>)"
        start = f"start: ({opened} {thought} gap?)? {ANSWER}"
    rules = [
        start,
        f"open[lazy]: {json.dumps(format_.begin)}",
        f"thought[suffix={json.dumps(format_.end)}]: /(?s:.*)/",
        "TEXT: /(?s:.+)/",
        "gap: /\\n\\n?/",
    ]
    return structs.replace(grammar, before="\n".join(rules))
