"""``blitzscale report``: the results of several replays in one report, or what is known of one scale operation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from bench.command_line import red_line, say_wrong, show
from bench.operation.command import report_operation
from bench.replay.document import Document, read_document
from bench.replay.figures import label_of, table
from bench.replay.objectives import FACTOR, Slo
from bench.replay.options import MeanTbt, MeanTtft, Outputs, PngFile, SloFactor, SloTbt, SloTtft
from compose.cli.options import URL_DEFAULT, Json, Url
from shared.errors import BadRequest

app = typer.Typer(
    help="Put the results of several replays into one report, or tell about one scale operation.", add_completion=False
)
PageFile = Annotated[
    Path | None, typer.Option("--html", "-o", metavar="FILE", help="Write a report of one page there.")
]


def _documents(files: list[Path], slo: Slo | None) -> list[Document]:
    documents = [read_document(file) for file in files]
    if len({label_of(document) for document in documents}) < len(documents):
        documents = [
            msgspec.structs.replace(document, label=str(file)) for document, file in zip(documents, files, strict=True)
        ]
    return documents if slo is None else [document.judged_by(slo) for document in documents]


def _operation(whats: list[Path]) -> str:
    """The operation that is meant; empty: results of replays are. A file that is missing is no operation."""
    name = str(whats[0])
    return name if len(whats) == 1 and not os.path.exists(name) and not name.endswith(".json") else ""


@app.callback(invoke_without_command=True, subcommand_metavar="", context_settings={"allow_interspersed_args": True})
def report(
    *,
    whats: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|OPERATION",
            help="Results of `blitzscale replay --json`; or a scale operation: its id, a model for its newest, or "
            "`latest`.",
        ),
    ],
    png_file: PngFile = None,
    html_file: PageFile = None,
    slo_ttft: SloTtft = None,
    slo_tbt: SloTbt = None,
    mean_ttft: MeanTtft = None,
    mean_tbt: MeanTbt = None,
    slo_factor: SloFactor = FACTOR,
    url: Url = URL_DEFAULT,
    as_json: Json = False,
) -> None:
    """Put the results of several replays, each called by the name of its file, into one report; or tell what happened
    in one scale operation, and why.

    With objectives, all replays are judged by them; else each by those that it was measured with. What is known of an
    operation comes from the gateway.
    """
    with red_line():
        outputs = Outputs.checked(None, png_file, html_file)
        slo = Slo.of(ttft_ms=slo_ttft, tbt_ms=slo_tbt, mean_ttft_ms=mean_ttft, mean_tbt_ms=mean_tbt, factor=slo_factor)
        if name := _operation(whats):
            if slo is not None or png_file is not None:
                raise BadRequest(f"{name}: no such file; objectives and --png are for results of replays")
            report_operation(name, url, as_json=as_json, html_file=html_file)
            return
        if as_json:
            raise BadRequest("--json is for a scale operation: results of replays are JSON already", param="json")
        _report_replays(whats, slo, outputs)


def _report_replays(files: list[Path], slo: Slo | None, outputs: Outputs) -> None:
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
