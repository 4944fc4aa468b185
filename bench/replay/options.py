"""Options that ``blitzscale replay``, ``report``, ``simulate`` and ``bench evaluate`` share: objectives, and where
figures go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from bench.command_line import check_folder, writing
from bench.replay.document import Document
from bench.replay.figures import NOTHING, Beside
from shared.errors import BadRequest

SloTtft = Annotated[float | None, typer.Option(metavar="MS", help="Objective for the time to the first token.")]
SloTbt = Annotated[
    float | None, typer.Option(metavar="MS", help="Objective for a request's mean time between two tokens.")
]
MeanTtft = Annotated[
    float | None, typer.Option(metavar="MS", help="Instead of --slo-ttft: the mean of which it is a multiple.")
]
MeanTbt = Annotated[float | None, typer.Option(metavar="MS", help="The same for --slo-tbt.")]
SloFactor = Annotated[float, typer.Option(metavar="X", help="Objectives are X times the given means.")]
PngFile = Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the figures there.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report of one page there.")]


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files that are wanted."""

    json_file: Path | None
    png_file: Path | None
    html_file: Path | None

    @classmethod
    def checked(cls, json_file: Path | None, png_file: Path | None, html_file: Path | None) -> Outputs:
        """Before anything is measured. Raises ``BadRequest`` if a file could not be written, or not be drawn."""
        for path in (json_file, png_file, html_file):
            check_folder(path)
        for option, path, endings in (("--png", png_file, (".png",)), ("--html", html_file, (".html", ".htm"))):
            # A name without an ending promises nothing.
            if path is not None and path.suffix and path.suffix.lower() not in endings:
                raise BadRequest(
                    f"{option} {path}: figures are drawn as PNG (--png FILE.png) or HTML (--html FILE.html), not as "
                    f"{path.suffix!r}",
                    param=option[2:],
                )
        for option, path, package in (("--png", png_file, "matplotlib"), ("--html", html_file, "plotly")):
            if path is not None and find_spec(package) is None:
                raise BadRequest(f"{option} needs {package}: pip install 'blitzscale[bench]'", param=option[2:])
        return cls(json_file, png_file, html_file)

    def draw(self, documents: Sequence[Document], beside: Beside = NOTHING) -> None:
        """The figures of these replays together. Raises ``NotWritten``."""
        if self.png_file is not None:
            from bench.replay import plot

            with writing(self.png_file):
                plot.save(documents, self.png_file, beside)
        if self.html_file is not None:
            from bench.replay import page

            with writing(self.html_file):
                page.save(documents, self.html_file, beside)
