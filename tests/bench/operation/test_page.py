"""The page of an operation: it is parsed, and says in text what the record has; a foreign text stays one."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

pytest.importorskip("plotly")

from bench.embedded import as_literal
from bench.operation.page import MAX_ROWS, page_of
from bench.operation.report import OperationReport
from shared.messages.decisions import DecisionRecord
from shared.messages.operations import ScaleRecord
from tests.bench.operation import made_up
from tests.bench.operation.test_report import OPERATIONS

_VOID = {"meta"}
_KNOWN = _VOID | {
    "html", "head", "title", "style", "body", "h1", "h2", "h3", "p", "ul", "li", "div", "table", "thead", "tbody", "tr",
    "th", "td", "i", "b", "details", "summary", "script",
}  # fmt: skip
HOSTILE = (
    "</script><script>alert(1)</script>", "<!--<script>", "\u2028\u2029", "'\" onload=alert(1) x=\"", "<img src=x>",
    "</title></style><b>&lt;", "]]><!DOCTYPE x>", "\u202egnp.exe\x00\x1b[31m",
)  # fmt: skip


class _Page(HTMLParser):
    """Fails on elements and attributes that the page has not, and on what is not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _KNOWN
        allowed = {"class", "id", "lang", "scope", "style", "charset", "name", "content", "http-equiv"}
        assert {name for name, _ in attrs} <= allowed, attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def charts(self) -> list[dict[str, Any]]:
        """What the script draws."""
        found = re.match(r"const CHARTS = (.*);\n", self.scripts[-1]) if self.scripts else None
        return json.loads(found[1]) if found else []  # type: ignore[no-any-return]


def _page(record: ScaleRecord, *decisions: DecisionRecord) -> _Page:
    return _Page(page_of(OperationReport.of(record, decisions)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_kind_of_operation_has_a_page_that_says_all_in_text(name: str) -> None:
    record = OPERATIONS[name]
    page = _page(record, made_up.decision())
    said = " ".join(page.texts)
    assert OperationReport.of(record, [made_up.decision()]).sentence in said
    expected = [record.plan_id, *record.explain, *record.left_out]
    for target in record.targets:
        expected += [
            target.worker_id,
            target.instance_id,
            target.failure,
            *(f"{ms:,.1f}" for ms in target.layer_ready_ms),
        ]
    for pair in record.live:
        expected += [pair.why, *(f"{batch.first_token_ms:,.1f}" for batch in pair.batches if batch.first_token_ms >= 0)]
    assert [text for text in expected if text not in said] == []
    assert ("1 instance would have 240 % more to do" in said) == (record.plan_id == "plan-1")
    with_layers = [target.worker_id for target in record.targets if target.layer_ready_ms]
    drawn = [curve["name"] for chart in page.charts[:1] for curve in chart["data"]]
    assert drawn == with_layers
    assert bool(page.scripts) == bool(with_layers), "plotly's script only where it draws"


def test_charts_have_the_records_figures() -> None:
    layers, batches = _page(made_up.record()).charts
    assert layers["data"][0]["x"] == [25.0, *made_up.target(1).layer_ready_ms]
    assert layers["data"][0]["y"] == list(range(made_up.NUM_LAYERS + 1))
    target, source = batches["data"]
    assert target["name"] == "target worker-3"
    assert [a + b for a, b in zip(target["y"], source["y"], strict=True)] == [made_up.NUM_LAYERS] * 5


def _hostile(value: Any, text: str) -> Any:
    """The same with ``text`` for each free text."""
    if isinstance(value, dict):
        kept = {"kind", "status", "direction", "role", "source_kind", "policy", "outcome", "was", "asked_by"}
        return {key: each if key in kept else _hostile(each, text) for key, each in value.items()}
    if isinstance(value, list):
        return [_hostile(each, text) for each in value]
    return text if isinstance(value, str) else value


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_stays_text(text: str) -> None:
    failed = msgspec.structs.replace(made_up.failed(), trace_id="trace")
    record = msgspec.convert(_hostile(msgspec.to_builtins(failed), text), ScaleRecord)
    decision = msgspec.convert(_hostile(msgspec.to_builtins(made_up.decision()), text), DecisionRecord)
    page = _page(record, decision)
    assert len(page.scripts) > 0
    own = [script for script in page.scripts if "CHARTS" in script]
    assert len(own) == 1
    assert not {"<", "\u2028", "\u2029"} & set(own[0].partition("\n")[0])
    assert len(page.charts) == 2
    said = " ".join(page.texts)
    assert ("\\u202e" if "\u202e" in text else "\\u2028" if "\u2028" in text else text) in said
    assert not {"\u202e", "\u2028", "\x00", "\x1b"} & set(said)


def test_a_literal_is_the_data_again_and_ends_no_script() -> None:
    literal = as_literal(HOSTILE)
    assert "<" not in literal
    assert tuple(json.loads(literal)) == HOSTILE


def test_what_is_much_is_cut_and_counted() -> None:
    many = tuple(made_up.target(number) for number in range(MAX_ROWS + 7))
    page = _page(made_up.record(targets=many, explain=("line",) * (MAX_ROWS + 3)))
    said = " ".join(page.texts)
    assert "and 7 more; --json has all" in said
    assert "and 3 more; --json has all" in said
    assert f"The chart shows the first {len(page.charts[0]['data'])} of {len(many)}." in said
