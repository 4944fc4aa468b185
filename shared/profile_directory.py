"""The profiles that a service was given: a directory of them, or one file.

A service never fails for what is in it: a file that is of no use is warned of once, and left out.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from shared.errors import BadProfile
from shared.profile import Profile, read_profile

log = logging.getLogger(__name__)

MAX_FILES = 1000
_SUFFIX = ".json"

_Signature = tuple[int, int]
"""When the file changed, and its size."""


class ProfileDirectory:
    """One ``look`` at a time; ``find`` at any time."""

    def __init__(self, path: Path | None) -> None:
        """None: there are no profiles. Nothing is read before ``look``."""
        self._path = path
        self._read: dict[Path, tuple[_Signature, Profile | None]] = {}
        self._by_model: dict[str, list[tuple[Path, Profile]]] = {}
        self._warned: set[str] = set()

    def look(self) -> None:
        """Read what is new or has changed since. Blocks; quick if nothing has."""
        if self._path is None:
            return
        found = self._files(self._path)
        if found == {file: signature for file, (signature, _) in self._read.items()}:
            return
        known, self._read = self._read, {}
        by_model: dict[str, list[tuple[Path, Profile]]] = {}
        for file, signature in found.items():
            before = known.get(file)
            profile = before[1] if before is not None and before[0] == signature else self._profile(file)
            self._read[file] = signature, profile
            if profile is not None:
                by_model.setdefault(profile.model_hash, []).append((file, profile))
        self._by_model = by_model

    def find(
        self, *, model_hash: str, layout_hash: str, engine: str, device: str, gpu_name: str = ""
    ) -> Profile | None:
        """The newest profile of instances of that kind, as of the last look. ``gpu_name``: as of their worker."""
        fitting: list[Profile] = []
        for file, profile in self._by_model.get(model_hash, ()):
            try:
                profile.check(layout_hash=layout_hash, engine=engine, device=device, gpu_name=gpu_name)
            except BadProfile as error:
                self._warn(f"{file} is not used: {error.message}")
            else:
                fitting.append(profile)
        return max(fitting, key=lambda profile: profile.measured_at_s, default=None)

    def _files(self, path: Path) -> dict[Path, _Signature]:
        found: dict[Path, _Signature] = {}
        try:
            names = sorted(os.listdir(path)) if path.is_dir() else None
            files = [path] if names is None else [path / name for name in names if name.endswith(_SUFFIX)]
            for file in files[:MAX_FILES]:
                if file.is_file():
                    status = file.stat()
                    found[file] = status.st_mtime_ns, status.st_size
        except OSError as error:
            self._warn(f"the profiles in {path} cannot be read: {error.strerror}")
            return found
        if names is None and not found:
            self._warn(f"the profiles in {path} cannot be read: there is no such file or directory")
        if len(files) > MAX_FILES:
            self._warn(f"{path} has {len(files)} profiles: only the first {MAX_FILES} are read")
        return found

    def _profile(self, file: Path) -> Profile | None:
        try:
            return read_profile(file)
        except BadProfile as error:
            self._warn(f"{error.message}; it is not used")
            return None

    def _warn(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < 2 * MAX_FILES:
            self._warned.add(text)
            log.warning("%s", text)
