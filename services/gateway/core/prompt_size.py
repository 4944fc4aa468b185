"""Prompts that are too large for any message to a worker, recognised before they are tokenized.

Tokenizing megabytes takes seconds; a prompt longer than the bus's largest message is refused by its length.
"""

from __future__ import annotations

from shared.errors import PayloadTooLarge

_MAX_UTF8_BYTES = 4
"""Of one character."""


def refuse_large_text(text: str, *, max_bytes: int, param: str) -> None:
    """Raises ``PayloadTooLarge`` for one prompt's text of more than ``max_bytes`` in UTF-8."""
    if len(text) * _MAX_UTF8_BYTES <= max_bytes:
        return
    size_bytes = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
    if size_bytes > max_bytes:
        raise PayloadTooLarge(
            f"a prompt of {size_bytes} bytes of text is too large; at most {max_bytes} are allowed", param=param
        )


def refuse_many_ids(count: int, *, max_bytes: int, param: str) -> None:
    """Raises ``PayloadTooLarge`` for more ids than ``max_bytes``: each takes a byte or more on the wire."""
    if count > max_bytes:
        raise PayloadTooLarge(
            f"a prompt of {count} token ids is too large; at most {max_bytes} bytes are allowed", param=param
        )
