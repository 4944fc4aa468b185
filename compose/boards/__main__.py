"""``python -m compose.boards``: write ``compose/observability``."""

from __future__ import annotations

from compose.boards.files import FOLDER, write_boards

write_boards(FOLDER, force=True)
