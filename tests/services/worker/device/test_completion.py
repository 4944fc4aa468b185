"""What a call to a device gives."""

from __future__ import annotations

import threading

import pytest

from services.worker.device.completion import HOST_STREAMS, Completion, Landed, combined


class Pending(Landed[int]):
    """Not done until it is told."""

    done = False  # type: ignore[assignment]

    def result(self) -> int:
        if not self.done:
            raise RuntimeError("not done")
        return super().result()


def test_an_operation_of_a_host_has_run_on_the_callers_thread_when_the_call_returns() -> None:
    ran = HOST_STREAMS.compute.run(threading.get_ident)
    assert ran.done
    assert ran.error is None
    assert ran.result() == threading.get_ident()
    assert ran.device_s > 0.0


def test_an_error_is_the_completions() -> None:
    failed: Completion[float] = HOST_STREAMS.into.run(lambda: 1 / 0)
    assert failed.done
    assert isinstance(failed.error, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_several_are_done_when_all_are_and_fail_with_the_first_that_failed() -> None:
    first, second = Pending(1, device_s=2.0), Landed(2, device_s=3.0)
    both = combined(first, second)
    assert (both.done, both.error, both.device_s) == (False, None, 0.0)
    with pytest.raises(RuntimeError, match="not done"):
        both.result()
    first.done = True
    assert (both.done, both.error, both.device_s) == (True, None, 5.0)
    assert both.result() == (1, 2)
    late, early = ValueError("late"), ValueError("early")
    assert combined(second, Landed(error=early), Landed(error=late)).error is early


def test_none_are_done() -> None:
    assert combined().done
    assert combined().result() == ()
