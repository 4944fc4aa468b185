"""New passwords for a deployment that goes on meanwhile, in three steps; between them people reload servers and restart
services.

``add``: servers take the old and the new. ``switch``: services use the new. ``retire``: servers take only the new.
One file in the folder says which step was begun last and whether all its files were written, and it holds both sets of
passwords: it is written first and last, or at the end removed. So a step that was broken off is taken again with the
same passwords, and the next one waits for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from compose import passwords, private_files
from compose.errors import StackRefused
from compose.passwords import Passwords

Step = Literal["add", "switch", "retire"]
ROTATION = "rotation.json"


class Rotation(msgspec.Struct, frozen=True):
    """A rotation that is under way."""

    step: Step
    """Which was begun last."""
    old: Passwords
    new: Passwords
    done: bool = False
    """Whether everything was written that belongs to the step. ``retire`` has no such state: it ends the rotation."""

    @property
    def used(self) -> Passwords:
        """What services are told to use."""
        return self.old if self.step == "add" else self.new

    @property
    def accepted(self) -> tuple[Passwords, ...]:
        """What servers take."""
        return (self.new,) if self.step == "retire" else (self.old, self.new)


def read(folder: Path) -> Rotation | None:
    """The one that is under way in a folder."""
    path = folder / ROTATION
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rotation)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StackRefused(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise StackRefused(f"{path} cannot be understood ({error}): --renew makes all passwords anew") from error


def begin(folder: Path, step: Step | None, known: Passwords | None, now: Rotation | None) -> Rotation | None:
    """Where the folder is with ``step`` begun; None: files are written again as they are. ``known``: the passwords in
    it. Raises ``StackRefused`` out of order, and for all but the same step after one that was broken off."""
    if step is not None and known is None:
        raise StackRefused(f"{folder} holds no passwords to rotate: make them first, without --rotate")
    if now is not None and not now.done and step != now.step:
        raise StackRefused(f"--rotate {now.step} was broken off, and some files are of before: repeat it first")
    match step, now:
        case "add", None if known is not None:
            return Rotation("add", known, passwords.successors(known))
        case "add", Rotation(step="switch"):
            raise StackRefused("services use the new passwords of an unfinished rotation: first --rotate retire")
        case "switch", None:
            raise StackRefused("servers know no new passwords yet: first --rotate add, and have them read it")
        case "switch", Rotation(step="add"):
            return Rotation("switch", now.old, now.new)
        case "retire", Rotation(step="switch"):
            return Rotation("retire", now.old, now.new)
        case "retire", Rotation(step="add"):
            raise StackRefused("services still use the old passwords: first --rotate switch, and restart them")
    # A step that was begun before, or the last one's end: nothing is left to retire.
    return now


def save(folder: Path, rotation: Rotation) -> None:
    """Before anything else is written."""
    private_files.write(folder / ROTATION, msgspec.json.encode(rotation).decode(), 0o600)
    private_files.sync(folder)


def complete(folder: Path, rotation: Rotation) -> None:
    """After everything else was written."""
    private_files.sync(folder)
    if rotation.step == "retire":
        end(folder)
    else:
        save(folder, msgspec.structs.replace(rotation, done=True))


def end(folder: Path) -> None:
    """With nothing left to remember."""
    (folder / ROTATION).unlink(missing_ok=True)
    private_files.sync(folder)
