from __future__ import annotations

from bench.chaos.answer import Answer
from bench.chaos.schema import AnyOfSchema

VALID = '{"name": "a", "kind": "red", "sizes": [1, 999]}'
EXPECTED = AnyOfSchema(3, 40)


def test_any_answer_of_the_schema_will_do() -> None:
    assert EXPECTED.wrong(Answer(VALID, "stop", 3, 30)) == ""
    assert EXPECTED.wrong(Answer(VALID.replace("red", "blue"), "stop", 3, 30)) == ""
    assert EXPECTED.wrong(Answer(VALID[:20], "length", 3, 40)) == ""


def test_what_is_none_and_what_ends_early_is_wrong() -> None:
    for text in ("", VALID[:-1], VALID * 2, VALID.replace("red", "cyan"), VALID.replace("999", "1000"), "[]"):
        assert "no answer of its schema" in EXPECTED.wrong(Answer(text, "stop", 3, 30)), text
    assert "no answer of its schema" in EXPECTED.wrong(Answer(VALID[:20], "length", 3, 20))
    assert "prompt_tokens" in EXPECTED.wrong(Answer(VALID, "stop", 4, 30))
