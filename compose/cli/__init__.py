"""The ``blitzscale`` command."""

from compose.cli.app import main, run

__all__ = ["main", "run"]
