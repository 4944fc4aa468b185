"""Messages may grow by optional fields: what was sent before means the same, and what comes later is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.messages.codec import decode, encode
from tests.shared.messages.examples import example, kinds

GOLDEN: dict[str, str] = json.loads((Path(__file__).parent / "golden" / "messages.json").read_text())


def test_there_are_golden_bytes_of_every_kind() -> None:
    assert sorted(GOLDEN) == sorted(kinds())


@pytest.mark.parametrize("tag", GOLDEN)
def test_what_was_sent_before_means_the_same_now(tag: str) -> None:
    sent = bytes.fromhex(GOLDEN[tag])
    message = decode(sent, kinds()[tag])
    assert _within(msgspec.msgpack.decode(sent), msgspec.to_builtins(message, builtin_types=(bytes,)))


def _within(old: Any, new: Any) -> bool:
    """Everything that was sent is there under its name; there may be more."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key in new and _within(old[key], new[key]) for key in old)
    if isinstance(old, list):
        return len(old) == len(new) and all(_within(a, b) for a, b in zip(old, new, strict=True))
    return bool(old == new)


@pytest.mark.parametrize("tag", GOLDEN)
def test_a_reader_that_knows_fewer_fields_reads_todays_message(tag: str) -> None:
    """It passes over fields that it does not know, but has no other values for those that it does."""
    old = msgspec.msgpack.decode(bytes.fromhex(GOLDEN[tag]))
    new = msgspec.msgpack.decode(encode(example(kinds()[tag])))
    assert set(old) <= set(new), f"fields of {tag} are no longer sent"
    assert all(type(old[key]) is type(new[key]) for key in old)


@pytest.mark.parametrize("tag", kinds())
def test_an_example_of_every_kind_survives_the_wire(tag: str) -> None:
    made = example(kinds()[tag])
    assert decode(encode(made), type(made)) == made


@pytest.mark.parametrize("tag", kinds())
def test_unknown_fields_are_passed_over_and_optional_ones_may_be_missing(tag: str) -> None:
    kind = kinds()[tag]
    sent = msgspec.msgpack.decode(encode(example(kind)))
    assert decode(msgspec.msgpack.encode(sent | {"of a later version": 1}), kind) == example(kind)
    optional = {field.encode_name: field for field in msgspec.structs.fields(kind) if not field.required}
    made = decode(msgspec.msgpack.encode({key: sent[key] for key in sent if key not in optional}), kind)
    assert all(getattr(made, field.name) == _default(field) for field in optional.values())


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
