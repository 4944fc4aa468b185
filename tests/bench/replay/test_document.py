from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.command_line import write
from bench.replay.document import read_document
from bench.replay.objectives import Slo
from shared.errors import BadRequest
from tests.bench.replay.documents import document


@pytest.mark.parametrize("with_cluster", [True, False])
def test_a_result_reads_as_it_was_written(tmp_path: Path, with_cluster: bool) -> None:
    written, path = document(with_cluster=with_cluster), tmp_path / "system.json"
    write(path, written.flat())
    assert read_document(path) == msgspec.structs.replace(written, label="system")


def test_the_file_has_figures_and_what_was_replayed_side_by_side() -> None:
    flat = document().flat()
    assert (flat["trace"], flat["planned"], flat["completed"], flat["failures"]) == ("t.csv", 4, 3, {"connect": 1})
    assert flat["void"] == ()
    assert "label" not in flat


def test_other_objectives_are_judged_by_what_was_recorded() -> None:
    found = document().judged_by(Slo(0.11, None))
    assert found.slo is not None
    assert (found.slo.attained, found.slo.share, found.slo.goodput_requests_per_s) == (1, 0.25, 0.25)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1]", b'{"trace": 3}', b'{"more":' + b"[" * 100_000])
def test_what_is_no_result_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadRequest, match=r"x\.json"):
        read_document(path)
