"""What contexts begin with, by name: chained hashes, in which a text's beginning stands for all tokens up to there.

Two uses, of the same chain: blocks of KV are found by what they hold (``prefix_cache`` of the worker, whole SHA-256: a
key that two texts share would be one's KV in the other's answer), and prompts that begin alike are counted and sent to
the same instances (in steps of ``STEP_TOKENS``, whatever the instances' blocks are; shortened, since no harm comes of a
collision).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

STEP_TOKENS = 64
"""Prompts are told apart at every so many tokens."""
MAX_STEPS = 128
"""What is behind so many steps tells none apart."""
NAME_BYTES = 16


def prefix_root(model_hash: str, scope: str) -> bytes:
    """What the chains of a model's contexts begin with, for requests that may see each other's KV."""
    return hashlib.sha256(f"{model_hash}\0{scope}".encode()).digest()


def chained(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """What stands for these tokens behind ``parent``."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()


def prefix_steps(root: bytes, token_ids: Sequence[int]) -> Iterator[bytes]:
    """The names, ``NAME_BYTES`` each, of a prompt's beginnings of one step, of two, and so on, as far as it goes."""
    key = root
    for end in range(STEP_TOKENS, min(len(token_ids), MAX_STEPS * STEP_TOKENS) + 1, STEP_TOKENS):
        key = chained(key, token_ids[end - STEP_TOKENS : end])
        yield key[:NAME_BYTES]
