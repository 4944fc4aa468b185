"""``python -m bench.recording.child MODULE``: a service's process as it is, recorded."""

from __future__ import annotations

import gc
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from bench.recording.recorder import recording
from compose.child import ChildSpec
from shared import ending

FOLDER_VARIABLE = "BENCH_RECORDING_FOLDER"
"""Where the recording goes; it is made."""
SUFFIX = ".recording"
_STATES_S = 60.0
"""What it may take to write how cores are in the end: ever longer, the more they were given."""


def recorded(spec: ChildSpec, folder: Path) -> ChildSpec:
    """The same process, which records into that folder."""
    python, flag, module = spec.argv
    argv = (python, flag, "bench.recording.child", module)
    return replace(spec, argv=argv, env={**spec.env, FOLDER_VARIABLE: str(folder)}, forks=None)


def main(module: str) -> None:
    folder, service = Path(os.environ[FOLDER_VARIABLE]), module.rpartition(".")[2]
    folder.mkdir(parents=True, exist_ok=True)
    # What is recorded is kept: there is ever more to look through for garbage, while the service stands still.
    gc.disable()
    # A service that is started again writes another one.
    with recording(folder / f"{service}-{os.getpid()}{SUFFIX}", [service]) as recorder:
        _before_the_end(recorder.close)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _before_the_end(close: Callable[[], None]) -> None:
    """A service ends its process itself, and nothing behind that is done."""
    end = ending.end_process

    def end_process(code: int) -> NoReturn:
        ending.end_process_within(_STATES_S)
        close()
        end(code)

    vars(ending)["end_process"] = end_process


if __name__ == "__main__":
    main(sys.argv.pop(1))
