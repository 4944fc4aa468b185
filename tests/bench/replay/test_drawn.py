"""Reports as files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.replay import plot
from bench.replay.figures import Beside, Curve, Panel
from tests.bench.replay.documents import document


@pytest.mark.parametrize("with_cluster", [True, False])
def test_a_png_is_drawn_of_one_and_of_several(tmp_path: Path, with_cluster: bool) -> None:
    for count in (1, 2):
        path = tmp_path / f"{count}.png"
        plot.save([document(f"a $name^ {n}", with_cluster=with_cluster, shortened=1) for n in range(count)], path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_page_needs_nothing_else_and_believes_no_name(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from bench.replay import page

    path = tmp_path / "x.html"
    page.save([document("</script><b>"), document("b", shortened=3)], path)
    text = path.read_text()
    assert len(text) > 1_000_000, "plotly's script is in it"
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    own = text[text.rindex("<body>") :]
    assert "</script><b>" not in own
    assert "load <b>" not in own
    assert "3 of 4 requests were made shorter" in own


def test_what_stands_beside_the_documents_is_drawn_and_said(tmp_path: Path) -> None:
    points = Curve("a", (1.0, 2.0), (90.0, None), "#0072B2", dots=True, notes=("2 hosts", "<4> hosts"))
    panel = Panel("What if", "%", "cost", (points,), axis="plain")
    labelled = replace(points, labels=("<60>", "0"))
    wide = Panel("By cost", "%", "cost", (labelled,), axis="cost", span=(0.5, 5.0), y_ticks=((90.0, "one nine"),))
    beside = Beside("Simulation", ((panel, panel, panel), (wide, wide)), ("two <hosts> will do",))
    plot.save([document("a")], png := tmp_path / "x.png", beside)
    assert png.stat().st_size > 0
    pytest.importorskip("plotly")
    from bench.replay import page

    page.save([document("a")], path := tmp_path / "x.html", beside)
    own = (text := path.read_text())[text.rindex("<body>") :]
    assert "<h1>Simulation of t.csv</h1>" in own
    assert "two &lt;hosts&gt; will do" in own
    assert '"mode":"markers"' in own
    assert own.count("class='grid two'") == 1
    assert own.count('"text":["&lt;60&gt;","0"]') == own.count('"ticktext":["one nine"]') == 2
    assert "2 hosts" in own
    assert "<4> hosts" not in own
