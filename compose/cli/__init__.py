"""The ``blitzscale`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from compose.cli.exit_status import INTERRUPTED


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; its exit status. Failures that were foreseen are one line on stderr."""
    # Here: what is imported takes a while, in which people press Ctrl-C.
    try:
        from compose.cli import app
    except KeyboardInterrupt:
        return INTERRUPTED
    return app.run(arguments)


def main() -> None:
    """The console script."""
    sys.exit(run())
