"""The transport benchmark measures what it says, at any speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.transport import PAGES, command, measure

pytestmark = pytest.mark.ucx


def test_every_size_and_kind_of_page_has_a_rate() -> None:
    rates = measure(chunk_bytes=(64 << 10, 1 << 20), total_bytes=2 << 20, num_rounds=2)
    assert [(rate.pages, rate.chunk_bytes) for rate in rates] == [(p, c) for p in PAGES for c in (64 << 10, 1 << 20)]
    assert all(rate.transport_gbytes_per_s > 0 and rate.copy_gbytes_per_s > 0 and rate.ratio > 0 for rate in rates)


def test_a_total_that_is_no_whole_number_of_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number"):
        measure(chunk_bytes=(3,), total_bytes=1 << 20)


def test_json_has_one_entry_for_each_line(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    file = tmp_path / "rates.json"
    arguments = ["--chunk-kib", "256", "--total-mib", "1", "--rounds", "1", "--json", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert [entry["pages"] for entry in json.loads(file.read_text())] == list(PAGES)
