"""``python -m bench.gpu [--rows a,b] [--json FILE] [--keep FOLDER]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.gpu.figures import FAILED
from bench.gpu.run import ROWS, run_rows


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 when something failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help="which, with commas (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, after each row")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and compiled kernels there")
    given = parser.parse_args(arguments)
    names = given.rows.split(",")
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    found = run_rows(names, json_file=given.json, folder=given.keep, show=_show)
    return 1 if any(one.unit == FAILED for one in found) else 0


def _show(table: str) -> None:
    sys.stdout.write(f"{table}\n\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
