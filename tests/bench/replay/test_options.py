from __future__ import annotations

from pathlib import Path

import pytest

from bench.replay import options
from bench.replay.options import Outputs
from shared.errors import BadRequest


def test_figures_that_could_not_be_drawn_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    with pytest.raises(BadRequest, match=r"--html needs plotly: pip install 'blitzscale\[bench\]'"):
        Outputs.checked(None, None, tmp_path / "x.html")
    with pytest.raises(BadRequest, match="--png needs matplotlib"):
        Outputs.checked(None, tmp_path / "x.png", None)
    assert Outputs.checked(tmp_path / "x.json", None, None).html_file is None


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no such directory"):
        Outputs.checked(None, None, tmp_path / "absent" / "x.html")
