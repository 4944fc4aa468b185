"""What the command ends with: one meaning per number, for scripts, whichever command it is."""

from __future__ import annotations

FAILED = 1
INTERRUPTED = 130
MEANINGS = (
    ("0", "done; of `up` and `top` also: they were told to end, by Ctrl-C or SIGTERM"),
    (
        "1",
        "refused or failed, and one line on stderr says why. Also: of `scale`, the operation failed, gave fewer "
        "instances, or had not ended after `--timeout` (it goes on); of `workers drain --wait`, the worker is not free "
        "yet; of `down`, nothing runs, or it had not stopped after `--timeout` (it goes on stopping)",
    ),
    ("2", "wrong usage: nothing was tried"),
    ("130", "interrupted by Ctrl-C"),
)
"""Status, and when."""
