"""Which host copies there are to be, by name: the paper's, and those of the systems that it is compared with."""

from __future__ import annotations

from typing import Literal

CopiesPolicy = Literal["one", "every-host", "kept"]
"""``one``: of each model in the whole cluster (paper section 4). ``every-host``: of each model on each host. ``kept``:
those that loads left on their hosts, and no others."""
COPIES_POLICIES: tuple[CopiesPolicy, ...] = ("one", "every-host", "kept")
KEEP_COPIES_S = 300.0
"""What a load left goes when no instance of its model has been on its host for so long: the five minutes that the paper
gives ServerlessLLM (section 3)."""
