"""Every block of commands in ``docs/deploy.md`` is run by a test, or the page says that it was not run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "deploy.md"
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
AS_IT_STANDS = {
    "export BLITZ_MODELS": "tests/containers/test_a_deployment.py",
    "mkdir -m 700": "tests/containers/test_a_deployment.py",
}
"""By how the block begins: the test that runs its commands, paths and ports of the machine aside."""
THE_SAME_BY_OTHER_WORDS = {
    "for service in gateway": "tests/containers/images.py",
    "blitzscale credentials $HOME/.blitzscale --kubernetes": "tests/containers/test_kubernetes.py",
    "kubectl apply -f compose/kubernetes/fill-models.yaml": "tests/containers/test_kubernetes.py",
    "kubectl -n blitzscale port-forward": "tests/containers/test_kubernetes.py",
    "blitzscale credentials $HOME/.blitzscale      ": "tests/containers/test_kubernetes.py",
    "blitzscale credentials $HOME/.blitzscale --rotate add": "tests/containers/test_kubernetes.py",
    "redis() {": "tests/containers/test_kubernetes.py",
}
"""With ``kubectl`` or a registry, which only a cluster has: the test that has the same done to pods of containers."""


def test_each_block_is_run_or_marked() -> None:
    page = PAGE.read_text(encoding="utf-8")
    known = AS_IT_STANDS | THE_SAME_BY_OTHER_WORDS
    found = []
    for block in _BLOCK.findall(page):
        (begins,) = [begin for begin in known if block.startswith(begin)] or [f"unknown: {block.splitlines()[0]}"]
        found.append(begins)
        if begins in AS_IT_STANDS:
            assert "kubectl" not in block
    assert sorted(found) == sorted(known)
    assert all((ROOT / test).exists() for test in known.values())
    assert "blocks with `kubectl` or a registry have not run as they stand here" in " ".join(page.split())
