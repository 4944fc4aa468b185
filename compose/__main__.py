"""``python -m compose``: the ``blitzscale`` command without the console script."""

from compose.cli import main

main()
