"""Messages of earlier releases are understood: whoever upgrades one process at a time loses none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.messages.codec import decode, encode
from tests.shared.messages.examples import example, kinds

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.json"))
CASES = [(file.stem, tag, raw) for file in GOLDEN for tag, raw in json.loads(file.read_text()).items()]


@pytest.mark.parametrize(("release", "tag", "raw"), CASES, ids=[f"{release}-{tag}" for release, tag, _ in CASES])
def test_what_an_earlier_release_sent_means_the_same_now(release: str, tag: str, raw: str) -> None:
    kind = kinds().get(tag)
    assert kind is not None, f"{release} sends {tag}: a kind that is no longer understood breaks what runs"
    sent = bytes.fromhex(raw)
    message = decode(sent, kind)
    assert _within(msgspec.msgpack.decode(sent), msgspec.to_builtins(message, builtin_types=(bytes,)))


def _within(old: Any, new: Any) -> bool:
    """Everything that was sent is there under its name; there may be more."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key in new and _within(old[key], new[key]) for key in old)
    if isinstance(old, list):
        return len(old) == len(new) and all(_within(a, b) for a, b in zip(old, new, strict=True))
    return bool(old == new)


def test_there_are_golden_bytes_of_the_release_before() -> None:
    assert GOLDEN
    assert len(CASES) > 60


@pytest.mark.parametrize("tag", kinds())
def test_an_example_of_every_kind_survives_the_wire(tag: str) -> None:
    made = example(kinds()[tag])
    assert decode(encode(made), type(made)) == made


@pytest.mark.parametrize(("release", "tag", "raw"), CASES, ids=[f"{release}-{tag}" for release, tag, _ in CASES])
def test_a_reader_that_knows_fewer_fields_reads_todays_message(release: str, tag: str, raw: str) -> None:
    """An earlier release passes over fields that it does not know, but has no other values for those that it does."""
    old = msgspec.msgpack.decode(bytes.fromhex(raw))
    new = msgspec.msgpack.decode(encode(example(kinds()[tag])))
    assert set(old) <= set(new), f"{release} needs fields of {tag} that are no longer sent"
    assert all(type(old[key]) is type(new[key]) for key in old)
