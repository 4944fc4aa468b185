from __future__ import annotations

import contextlib
import importlib
import math
import pkgutil

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shared.messages
from shared.messages.codec import MalformedMessage, Message, decode, encode, prepare
from shared.messages.common import Ack, ErrorInfo
from shared.messages.disaggregated import DecodeReserved
from shared.messages.feeds import FetchRange
from shared.messages.generation import Cancel, SamplingParams, Submit
from shared.messages.live import Dissolve, HandOver, Pull, PullKv, Seal
from shared.messages.load import LoadReport
from shared.transport.tags import MAX_NUMBER
from tests.shared.messages.examples import example

for module in pkgutil.iter_modules(shared.messages.__path__):
    importlib.import_module(f"shared.messages.{module.name}")
KINDS = [kind for kind in Message.__subclasses__() if kind.__module__.startswith("shared.messages")]

SUBMIT = Submit(
    request_id="r",
    attempt=2,
    gateway_id="g",
    instance_id="i",
    model="m",
    model_hash="h",
    prompt_token_ids=(1, 2, 3),
    sampling=SamplingParams(max_tokens=4, seed=5, logit_bias=((7, -1.5),), logprobs=0),
    gateway_incarnation="1",
)


def test_messages_round_trip() -> None:
    assert decode(encode(SUBMIT), Submit) == SUBMIT
    assert decode(encode(Ack()), Ack) == Ack()


def test_what_decodes_a_kind_is_made_when_it_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fresh(Message, frozen=True, kw_only=True, tag="fresh.v1"):
        number: int

    prepare(Fresh)
    monkeypatch.setattr(msgspec.msgpack, "Decoder", None)
    assert decode(encode(Fresh(number=1)), Fresh) == Fresh(number=1)


def test_every_message_has_a_versioned_tag_of_its_own_and_is_frozen() -> None:
    tags = [str(kind.__struct_config__.tag) for kind in KINDS]
    assert len(set(tags)) == len(tags) > 10
    assert all(tag.rpartition(".v")[2].isdigit() for tag in tags)
    assert all(kind.__struct_config__.frozen for kind in KINDS)


def changed(**fields: object) -> bytes:
    whole = msgspec.msgpack.decode(encode(Cancel(request_id="r", attempt=1)))
    return msgspec.msgpack.encode({key: value for key, value in (whole | fields).items() if value is not ...})


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode(Ack()),
        changed(kind="cancel.v2"),
        changed(attempt=...),
        changed(attempt="1"),
        changed(attempt=None),
        changed(request_id=1),
        encode(Cancel(request_id="r", attempt=1))[:-1],
        encode(Cancel(request_id="r", attempt=1)) + b"\x00",
        b"\x91" * 100_000,
    ],
)
def test_what_does_not_fit_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedMessage, match="Cancel") as caught:
        decode(payload, Cancel)
    assert caught.value.code == "malformed_message"


def test_a_field_from_a_newer_sender_is_ignored() -> None:
    assert decode(changed(added_later=3), Cancel) == Cancel(request_id="r", attempt=1)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(payload=st.binary(max_size=64))
def test_arbitrary_bytes_decode_or_are_malformed(kind: type[Message], payload: bytes) -> None:
    with contextlib.suppress(MalformedMessage):
        assert isinstance(decode(payload, kind), kind)


@pytest.mark.parametrize("value", [-1, 2**62, math.nan, math.inf])
@pytest.mark.parametrize("field", ["queued_tokens", "kv_blocks_total", "oldest_queued_s", "prefill_tokens_per_s"])
def test_a_report_of_what_nobody_can_have_counted_is_malformed(field: str, value: float) -> None:
    body = msgspec.to_builtins(example(LoadReport)) | {field: value}
    with pytest.raises(MalformedMessage, match=field):
        decode(msgspec.msgpack.encode(body), LoadReport)


WHICH = {
    FetchRange: ("epoch", "index", "unit", "offset", "num_bytes"),
    HandOver: ("serial",), Seal: ("count",), Pull: ("serial", "wait_s"), PullKv: ("serial",),
    Dissolve: ("first_serial", "source_busy_s"), DecodeReserved: ("ticket", "window_layers"),
}  # fmt: skip


@pytest.mark.parametrize("value", [-1, 2**62, math.nan, math.inf])
@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, fields in WHICH.items() for field in fields])
def test_what_no_transfer_or_pair_can_count_is_malformed(kind: type[Message], field: str, value: float) -> None:
    body = msgspec.to_builtins(example(kind), builtin_types=(bytes,)) | {field: value}
    with pytest.raises(MalformedMessage, match=field):
        decode(msgspec.msgpack.encode(body), kind)


def test_a_message_of_a_transfer_has_as_many_numbers_as_tags_have() -> None:
    body = msgspec.to_builtins(example(FetchRange), builtin_types=(bytes,))
    decode(msgspec.msgpack.encode(body | {"index": MAX_NUMBER}), FetchRange)
    with pytest.raises(MalformedMessage, match="index"):
        decode(msgspec.msgpack.encode(body | {"index": MAX_NUMBER + 1}), FetchRange)


def test_an_error_travels_inside_a_message_by_code() -> None:
    error = ErrorInfo(code="overloaded", message="full").as_error()
    assert ErrorInfo.of(error) == ErrorInfo(code="overloaded", message="full")
