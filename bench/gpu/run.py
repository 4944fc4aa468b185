"""Runs rows, each in a process of its own: an error that sticks to a CUDA context ends with its row."""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType

from bench.gpu.figures import FAILED, Figure, Report, document, table

ROWS: Mapping[str, str] = MappingProxyType(
    {
        "machine": "bench.gpu.machine",
        "kernels": "bench.gpu.kernels",
        "tokens": "bench.gpu.tokens",
        "waits": "bench.gpu.waits",
        "steps": "bench.gpu.steps",
        "first": "bench.gpu.first",
        "plans": "bench.gpu.plans",
        "flashinfer": "bench.gpu.attention",
        "prompt": "bench.gpu.prompt",
        "decode": "bench.gpu.decode",
        "checksum": "bench.gpu.checksum",
        "copy": "bench.gpu.ceilings",
        "host": "bench.gpu.host",
        "loads": "bench.gpu.loads",
        "pair": "bench.gpu.pair",
        "ipc": "bench.gpu.ipc",
    }
)
"""Name -> module with a function ``measure``. What is most in doubt comes first, of those that need no ucxx and then of
those that do (``pair`` needs FlashInfer as well). Rows use kernels that ``kernels`` or ``flashinfer`` compile, where
they were not built before, and compile them where these did not run."""
ROW_LIMIT_S = 170.0


def run_rows(
    names: Sequence[str],
    *,
    rows: Mapping[str, str] = ROWS,
    json_file: Path | None = None,
    folder: Path | None = None,
    show: Callable[[str], None] = lambda _: None,
    limit_s: float = ROW_LIMIT_S,
) -> list[Figure]:
    """All figures of these rows. After each row ``show`` gets the table so far, and the file is written anew.

    ``folder`` keeps logs and compiled kernels; without one they go. Raises ``KeyError`` for an unknown row.
    """
    modules = [(name, rows[name]) for name in names]
    found: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as temporary:
        for name, module in modules:
            begin_s = time.monotonic()
            found += _run_row(name, module, folder or Path(temporary), limit_s)
            found.append(Figure(name, "the row itself", time.monotonic() - begin_s, "s"))
            show(table(found))
            if json_file is not None:
                json_file.write_text(document(found), encoding="utf-8")
    return found


def _run_row(name: str, module: str, folder: Path, limit_s: float) -> list[Figure]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(name, module, folder, theirs))
    process.start()
    theirs.close()
    found: list[Figure] = []
    end_s = time.monotonic() + limit_s
    why = ""
    while True:
        if not ours.poll(max(end_s - time.monotonic(), 0)):
            why = f"not done after {limit_s:g} s"
            break
        try:
            found.append(ours.recv())
        except EOFError:
            break
    if not why:
        process.join(10)
    if process.exitcode:
        why = f"the process ended with status {process.exitcode}"
    process.kill()
    process.join()
    ours.close()
    return [*found, Figure(name, "row", None, FAILED, why)] if why else found


def _measure(name: str, module: str, folder: Path, pipe: Connection) -> None:
    report = Report(name, pipe.send, folder)
    try:
        importlib.import_module(module).measure(report)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the row's result
        report.failed("row", error)
    pipe.close()
