"""Renders each overlay of compose/kubernetes into compose/kubernetes/rendered. Needs ``kubectl``.

``--check`` writes nothing, and fails if what is rendered is not of these sources: also where there is no ``kubectl``,
by a digest of all that was read.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "compose" / "kubernetes"
OVERLAYS = ("gpu-node", "many-nodes", "one-node", "own-servers")
"""Others may be yours."""
RENDERED = FOLDER / "rendered"
DIGEST = "sources.sha256"


def rendered() -> dict[str, str]:
    """By name of file; without ``kubectl`` the digest only."""
    texts = {DIGEST: f"{_digest()}\n"}
    if shutil.which("kubectl"):
        for overlay in (FOLDER / "overlays" / name for name in OVERLAYS):
            command = ["kubectl", "kustomize", str(overlay)]
            texts[f"{overlay.name}.yaml"] = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True
            ).stdout
    return texts


def _digest() -> str:
    digest = hashlib.sha256()
    for folder in (FOLDER / "base", FOLDER / "components", *(FOLDER / "overlays" / name for name in OVERLAYS)):
        for path in sorted(folder.rglob("*.yaml")):
            digest.update(f"{path.relative_to(FOLDER)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def main() -> int:
    texts = rendered()
    if "--check" in sys.argv:
        stale = [name for name, text in texts.items() if (RENDERED / name).read_text() != text]
        sys.stdout.write("".join(f"{name} is not of these sources: make kubernetes\n" for name in stale))
        return bool(stale)
    if len(texts) == 1:
        sys.stderr.write("kubectl is not installed\n")
        return 1
    for name, text in texts.items():
        (RENDERED / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
