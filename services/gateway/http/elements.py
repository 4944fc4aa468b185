"""How many items JSON has, before they are made: a decoder looks at an array's length only behind its end."""

from __future__ import annotations

from shared.errors import BadRequest


def refuse_many_elements(json: bytes, limit: int, param: str) -> None:
    """Raises ``BadRequest`` for more than ``limit`` fields and items. Commas inside of strings do not count."""
    # Far from the limit, which is nearly always, one look is enough.
    if json.count(b",") < limit:
        return
    plain = json.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * limit:
        raise _too_many(limit, param)
    if sum(piece.count(b",") for piece in plain.split(b'"')[::2]) >= limit:
        raise _too_many(limit, param)


def _too_many(limit: int, param: str) -> BadRequest:
    return BadRequest(f"{param} has too many fields and items; at most {limit} are taken", param=param)
