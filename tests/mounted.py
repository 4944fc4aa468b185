"""Files as Kubernetes mounts a Secret: each behind one link to a folder, and all replaced when that link is."""

from __future__ import annotations

from pathlib import Path


class Mounted:
    """A volume; nothing is in it yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version = 0
        folder.mkdir()

    def __truediv__(self, name: str) -> Path:
        return self._folder / name

    def put(self, **texts: str) -> None:
        """These files, and no others, are in the volume from now on."""
        self._version += 1
        version = self._folder / f"..{self._version}"
        version.mkdir()
        for name, text in texts.items():
            (version / name).write_text(text)
            if not (self / name).is_symlink():
                (self / name).symlink_to(Path("..data") / name)
        link = self._folder / "..data_tmp"
        link.symlink_to(version.name)
        link.replace(self._folder / "..data")
