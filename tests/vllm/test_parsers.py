"""vLLM's parsers of calls beside ours, over the texts of our tests: docs/vllm.md says in what they differ."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.core.tools import transcripts
from tests.services.gateway.core.tools.transcripts import Transcript
from tests.vllm.conftest import PATIENCE_S, PYTHON

FAMILIES: dict[str, list[Transcript]] = {
    "hermes": transcripts.HERMES,
    "llama3_json": transcripts.LLAMA,
    "pythonic": transcripts.PYTHONIC,
}
SAME_WHOLE = {"hermes": 16, "llama3_json": 16, "pythonic": 12}
"""How many of the texts both read alike."""


def shown(text: str, calls: Any) -> Any:
    """Arguments by what they say, text without the blanks around it."""
    return text.strip(), [(name, _read(arguments)) for name, arguments in calls]


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.fixture(scope="module")
def theirs() -> dict[str, list[dict[str, Any]]]:
    async def read() -> bytes:
        texts = json.dumps({family: [text for text, _, _ in known] for family, known in FAMILIES.items()})
        process = await asyncio.create_subprocess_exec(
            PYTHON,
            str(Path(__file__).with_name("parsers.py")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(PATIENCE_S):
            said, _ = await process.communicate(texts.encode())
        return said

    said = asyncio.run(read()).decode()
    return json.loads(said.split("ANSWER", 1)[1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_both_read_alike(theirs: dict[str, list[dict[str, Any]]], family: str) -> None:
    alike = [
        text
        for (text, ours, calls), read in zip(FAMILIES[family], theirs[family], strict=True)
        if isinstance(read["whole"], list) and shown(*read["whole"]) == shown(ours, calls)
    ]
    assert len(alike) == SAME_WHOLE[family], alike
