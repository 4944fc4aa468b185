"""Which host copies there are to be, by name: the paper's, and those of the systems that it is compared with."""

from __future__ import annotations

from typing import Literal

from services.pool.core.allcache import AllCacheRules
from services.pool.core.cluster import ClusterView
from services.pool.core.placement import Placer
from services.pool.core.steps import CopyRules
from services.pool.core.ttl_cache import TtlCacheRules

CopiesPolicy = Literal["one", "every-host", "kept"]
"""``one``: of each model in the whole cluster (paper section 4). ``every-host``: of each model on each host. ``kept``:
those that loads left on their hosts, and no others."""
COPIES_POLICIES: tuple[CopiesPolicy, ...] = ("one", "every-host", "kept")
KEEP_COPIES_S = 300.0
"""What a load left goes when no instance of its model has been on its host for so long: the five minutes that the paper
gives ServerlessLLM (section 3)."""


def copy_rules(policy: CopiesPolicy, cluster: ClusterView, keep_copies_s: float = KEEP_COPIES_S) -> CopyRules:
    """The rules of that name for a cluster. ``keep_copies_s``: of copies that loads left; infinite: for good."""
    if policy == "one":
        return Placer(cluster, keep_copies_s)
    return TtlCacheRules(cluster, keep_copies_s) if policy == "kept" else AllCacheRules(cluster, keep_copies_s)
