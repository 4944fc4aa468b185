"""What a page of one file has in it: plotly's script, and data. Only this module imports plotly."""

from __future__ import annotations

import msgspec
from plotly.offline import get_plotlyjs

_ESCAPES = str.maketrans({"<": "\\u003c", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def plotly_script() -> str:
    """The element that holds it."""
    return f"<script>{get_plotlyjs()}</script>"


def as_literal(data: object) -> str:
    """As JSON for a script element. "</script" ends one, and "<!--" changes how it ends, wherever they stand: there is
    no "<" in it."""
    return msgspec.json.encode(data).decode().translate(_ESCAPES)
