from __future__ import annotations

import pytest

import shared.messages.codec
from shared.bus.wire import error_headers, error_of
from shared.errors import BlitzError, Internal, ModelNotFound, NoCapacity, Unavailable, error_from_code

assert shared.messages.codec  # defines a code of its own


def all_errors() -> list[type[BlitzError]]:
    found: list[type[BlitzError]] = []
    todo = [BlitzError]
    while todo:
        children = [cls for cls in todo.pop().__subclasses__() if cls.__module__.startswith("shared.")]
        found += children
        todo += children
    return found


def test_every_code_is_unique() -> None:
    codes = [cls.code for cls in all_errors()]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("cls", all_errors())
def test_every_error_survives_the_headers(cls: type[BlitzError]) -> None:
    error = error_of(error_headers(cls("why\nnot", param="p", retry_after_s=1.5)))
    assert type(error) is cls
    assert error is not None
    assert (error.message, error.param, error.retry_after_s) == ("why\nnot", "p", 1.5)


def test_a_subclass_is_caught_as_its_base() -> None:
    assert isinstance(error_from_code("no_capacity", "x"), NoCapacity | Unavailable)
    assert error_from_code("model_not_found", "x").http_status == ModelNotFound.http_status == 404


def test_an_unknown_code_becomes_internal_and_keeps_its_text() -> None:
    error = error_from_code("from_the_future", "text")
    assert type(error) is Internal
    assert "from_the_future: text" in error.message


def test_an_error_of_a_foreign_service_is_internal() -> None:
    error = error_of({"Nats-Service-Error": "boom", "Nats-Service-Error-Code": "500"})
    assert type(error) is Internal
    assert error is not None
    assert "boom" in error.message


def test_a_reply_without_error_headers_is_a_success() -> None:
    assert error_of(None) is None
    assert error_of({"traceparent": "x"}) is None


def test_a_bad_retry_header_does_not_hide_the_error() -> None:
    error = error_of({"Blitz-Error-Code": "overloaded", "Blitz-Error-Retry-After-S": "soon"})
    assert error is not None
    assert (error.code, error.retry_after_s) == ("overloaded", None)
