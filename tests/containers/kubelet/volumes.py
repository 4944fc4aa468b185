"""Volumes of a pod: folders on this machine, made as the kubelet makes them."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.containers.kubelet.fields import Fields

_DEFAULT_MODE = 0o644
_GROUP_READS = 0o440
_FOLDER_MODE = 0o2777
_DATA = "..data"
_versions = count()


@dataclass(frozen=True, slots=True)
class Projected:
    """Keys of a Secret or a ConfigMap as files."""

    kind: str
    name: str
    mode: int = _DEFAULT_MODE
    optional: bool = False
    items: Mapping[str, str] = field(default_factory=dict)
    """Path by key; empty: every key under its name."""


@dataclass(frozen=True, slots=True)
class EmptyFolder:
    limit: str | int
    in_memory: bool


@dataclass(frozen=True, slots=True)
class Claim:
    name: str
    read_only: bool = False


Source = Projected | EmptyFolder | Claim


def source_of(doc: Mapping[str, Any]) -> Source:
    """Raises ``UnknownField``."""
    volume = Fields(doc, "volume")
    volume.take("name")
    (kind,) = (name for name in doc if name != "name")
    entry = Fields(volume.take(kind), f"volume.{kind}")
    found: Source
    match kind:
        case "secret" | "configMap":
            items = {item["key"]: item["path"] for item in entry.take("items", [])}
            name = entry.take("secretName" if kind == "secret" else "name")
            mode, optional = entry.take("defaultMode", _DEFAULT_MODE), entry.take("optional", False)
            found = Projected(kind, name, mode, optional, items)
        case "emptyDir":
            found = EmptyFolder(entry.take("sizeLimit"), entry.take("medium", "") == "Memory")
        case "persistentVolumeClaim":
            found = Claim(entry.take("claimName"), entry.take("readOnly", False))
        case _:
            volume.take(kind)
    entry.end()
    return found


def texts_of(doc: Mapping[str, Any]) -> dict[str, bytes]:
    """The keys of a Secret or a ConfigMap."""
    if doc["kind"] == "Secret":
        return {key: base64.b64decode(value) for key, value in doc.get("data", {}).items()}
    return {key: value.encode() for key, value in doc.get("data", {}).items()}


def write_projected(folder: Path, source: Projected, texts: Mapping[str, bytes], group: int) -> None:
    """All files at once: they are links into a folder that is exchanged for another."""
    version = folder / f"..{next(_versions)}"
    version.mkdir(parents=True)
    version.chmod(0o755)
    chosen = source.items or {key: key for key in texts}
    for key, path in chosen.items():
        file = version / path
        file.write_bytes(texts[key])
        file.chmod(source.mode | _GROUP_READS)
        os.chown(file, 0, group)
    link = folder / "..data_tmp"
    link.symlink_to(version.name)
    old = (folder / _DATA).resolve() if (folder / _DATA).exists() else None
    link.rename(folder / _DATA)
    for path in chosen.values():
        if not (folder / path).is_symlink():
            (folder / path).symlink_to(f"{_DATA}/{path}")
    for file in folder.iterdir():
        if file.is_symlink() and not file.exists():
            file.unlink()
    if old is not None:
        shutil.rmtree(old)


def make_folder(folder: Path, group: int) -> None:
    """One that the pod's group may write to."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chown(folder, 0, group)
    folder.chmod(_FOLDER_MODE)


def mount_memory(folder: Path, size_bytes: int, group: int) -> None:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder], check=True)
    make_folder(folder, group)


def remove_folder(folder: Path) -> None:
    """With what is mounted below it."""
    for mount in folder.iterdir() if folder.exists() else ():
        if mount.is_mount():
            subprocess.run(["umount", "--lazy", mount], check=True)
    shutil.rmtree(folder, ignore_errors=True)
