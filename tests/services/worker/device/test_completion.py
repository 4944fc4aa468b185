"""What a call to a device gives."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.worker.device.completion import HOST_STREAMS, Completion, Landed, Pending, combined, landed


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


def test_what_is_pending_is_nothing_until_it_is_settled_and_settled_once() -> None:
    pending = Pending[int]()
    assert (pending.done, pending.error, pending.device_s) == (False, None, 0.0)
    with pytest.raises(RuntimeError, match="not done"):
        pending.result()
    pending.settle(Landed(7, device_s=0.5))
    assert (pending.done, pending.error, pending.device_s, pending.result()) == (True, None, 0.5, 7)
    with pytest.raises(RuntimeError, match="ended before"):
        pending.settle(Landed(8))
    failed = Pending[int]()
    failed.settle(Landed(error=ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        failed.result()


def test_who_asks_is_told_once_at_once_where_it_has_ended_and_else_by_who_settles_it() -> None:
    told: list[object] = []
    Landed(1).then(lambda: told.append("landed"))
    assert told == ["landed"]
    pending = Pending[int]()
    pending.then(lambda: told.append(threading.current_thread().name))
    pending.then(lambda: told.append(pending.result()))
    assert told == ["landed"]
    settling = threading.Thread(target=pending.settle, args=(Landed(2),), name="stream")
    settling.start()
    settling.join()
    assert told == ["landed", "stream", 2]
    pending.then(lambda: told.append("late"))
    assert told == ["landed", "stream", 2, "late"]


def test_who_asks_while_it_is_settled_is_told_once() -> None:
    for _ in range(200):
        pending, told, start = Pending[int](), [], threading.Barrier(4)

        def ask(pending=pending, told=told, start=start) -> None:
            start.wait()
            for _ in range(5):
                pending.then(lambda: told.append(pending.result()))

        asking = [threading.Thread(target=ask) for _ in range(3)]
        for thread in asking:
            thread.start()
        start.wait()
        pending.settle(Landed(3))
        for thread in asking:
            thread.join()
        assert told == [3] * 15


def test_who_fails_when_told_keeps_nobody_else_from_it(caplog: pytest.LogCaptureFixture) -> None:
    told: list[int] = []
    pending = Pending[int]()
    pending.then(lambda: 1 / 0)
    pending.then(lambda: told.append(1))
    pending.settle(Landed())
    assert told == [1]
    assert "division by zero" in caplog.text


def test_several_are_done_when_all_are_and_fail_with_the_first_that_failed() -> None:
    first, second = Pending[int](), Landed(2, device_s=3.0)
    both = combined(first, second)
    assert (both.done, both.error, both.device_s) == (False, None, 0.0)
    with pytest.raises(RuntimeError, match="not done"):
        both.result()
    first.settle(Landed(1, device_s=2.0))
    assert (both.done, both.error, both.device_s) == (True, None, 5.0)
    assert both.result() == (1, 2)
    late, early = ValueError("late"), ValueError("early")
    assert combined(second, Landed(error=early), Landed(error=late)).error is early


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_who_asks_for_several_is_told_once_with_the_last_of_them(order: tuple[int, ...]) -> None:
    parts = [Pending[int]() for _ in range(3)]
    told: list[bool] = []
    whole = combined(parts[0], Landed(), parts[1], parts[2])
    whole.then(lambda: told.append(whole.done))
    for number, index in enumerate(order):
        assert told == []
        parts[index].settle(Landed(error=ValueError("no")) if number == 1 else Landed(index))
    assert told == [True]
    whole.then(lambda: told.append(False))
    assert told == [True, False]


def test_none_are_done() -> None:
    told: list[int] = []
    assert combined().done
    assert combined().result() == ()
    combined().then(lambda: told.append(1))
    assert told == [1]


async def test_the_event_loop_goes_on_until_another_thread_settles_it() -> None:
    pending, failed = Pending[int](), Pending[int]()
    waiting = asyncio.gather(landed(pending), landed(pending), landed(Landed(1)))
    failing = asyncio.ensure_future(landed(failed))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    threading.Thread(target=lambda: (pending.settle(Landed(5)), failed.settle(Landed(error=OSError("gone"))))).start()
    assert await waiting == [5, 5, 1]
    with pytest.raises(OSError, match="gone"):
        await failing


async def test_who_is_cancelled_waits_no_more_and_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    pending = Pending[int]()
    waiting = asyncio.ensure_future(landed(pending))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    threading.Thread(target=pending.settle, args=(Landed(5),)).start()
    assert await landed(pending) == 5
    await asyncio.sleep(0)
    assert not caplog.records


def test_it_may_be_settled_once_the_event_loop_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    pending = Pending[int]()

    async def ask() -> None:
        waiting = asyncio.ensure_future(landed(pending))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(ask())
    pending.settle(Landed(1))
    assert not caplog.records
