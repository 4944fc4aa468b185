"""``blitzscale report``: the results of several replays in one report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from bench.command_line import red_line, say_wrong, show
from bench.replay.document import Document, read_document
from bench.replay.figures import label_of, table
from bench.replay.objectives import FACTOR, Slo
from bench.replay.options import HtmlFile, MeanTbt, MeanTtft, Outputs, PngFile, SloFactor, SloTbt, SloTtft

app = typer.Typer(help="Put the results of several replays into one report.", add_completion=False)


def _documents(files: list[Path], slo: Slo | None) -> list[Document]:
    documents = [read_document(file) for file in files]
    if len({label_of(document) for document in documents}) < len(documents):
        documents = [
            msgspec.structs.replace(document, label=str(file)) for document, file in zip(documents, files, strict=True)
        ]
    return documents if slo is None else [document.judged_by(slo) for document in documents]


@app.callback(invoke_without_command=True, subcommand_metavar="", context_settings={"allow_interspersed_args": True})
def report(
    *,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Results of `blitzscale replay --json`.")],
    png_file: PngFile = None,
    html_file: HtmlFile = None,
    slo_ttft: SloTtft = None,
    slo_tbt: SloTbt = None,
    mean_ttft: MeanTtft = None,
    mean_tbt: MeanTbt = None,
    slo_factor: SloFactor = FACTOR,
) -> None:
    """Put the results of several replays, each called by the name of its file, into one report.

    With objectives, all are judged by them; else each by those that it was measured with.
    """
    with red_line():
        outputs = Outputs.checked(None, png_file, html_file)
        slo = Slo.of(ttft_ms=slo_ttft, tbt_ms=slo_tbt, mean_ttft_ms=mean_ttft, mean_tbt_ms=mean_tbt, factor=slo_factor)
        documents = _documents(files, slo)
        shown = Table(title="replays", title_justify="left")
        shown.add_column("")
        for document in documents:
            shown.add_column(label_of(document), justify="right")
        for name, cells in table(documents):
            shown.add_row(name, *cells)
        show(shown)
        for document in documents:
            for reason in document.void:
                say_wrong(f"void: {label_of(document)}: {reason}")
        outputs.draw(documents)
