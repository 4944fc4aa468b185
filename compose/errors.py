"""What can go wrong while a stack is put together.

StackError
├── StackRefused     checked before anything started; nothing was left behind
├── StackNotReady    a deadline passed before it could serve
└── ProcessGaveUp    a process died again and again
"""

from __future__ import annotations

from collections.abc import Sequence


class StackError(Exception):
    """Base. The text is one line, made for people."""


class StackRefused(StackError):
    """The configuration cannot work on this machine now."""


class StackNotReady(StackError):
    """The stack did not become ready within its deadline."""


class ProcessGaveUp(StackError):
    """A supervised process crashes in a loop."""

    def __init__(self, name: str, message: str, last_lines: Sequence[str]) -> None:
        super().__init__(message)
        self.name = name
        self.last_lines = tuple(last_lines)
