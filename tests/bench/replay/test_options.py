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


@pytest.mark.parametrize(("png", "html"), [("x.xyz", None), ("x.svg", None), (None, "x.pdf"), (None, "x.png")])
def test_a_kind_of_picture_that_is_not_drawn_is_refused(tmp_path: Path, png: str | None, html: str | None) -> None:
    with pytest.raises(BadRequest, match=r"PNG \(--png FILE.png\) or HTML \(--html FILE.html\), not as '\."):
        Outputs.checked(None, tmp_path / png if png else None, tmp_path / html if html else None)


def test_endings_may_be_written_large_or_left_out(tmp_path: Path) -> None:
    for png, html in (("x.PNG", "x.htm"), ("figures", "page")):
        assert Outputs.checked(None, tmp_path / png, tmp_path / html).png_file == tmp_path / png
