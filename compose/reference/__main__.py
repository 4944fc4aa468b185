"""``python -m compose.reference``: write ``docs/reference``."""

from __future__ import annotations

from compose.reference.pages import FOLDER, pages

for name, text in pages().items():
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / name).write_text(text, encoding="utf-8")
