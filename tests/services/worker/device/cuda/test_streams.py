"""Operations of a GPU's stream: launched at once, done when the device has come to their end."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import weakref

import pytest

from services.worker.device.completion import landed, waited
from services.worker.device.cuda.streams import CudaStream
from shared.errors import BadRequest
from tests.services.worker.device.cuda.drivers import PlayedDriver
from tests.wait_until import eventually_sync


class Thing:
    pass


def test_what_was_launched_is_done_when_the_device_has_come_there() -> None:
    driver = PlayedDriver(by_hand=True)
    stream = CudaStream(driver, "compute")
    completion = stream.run(lambda: 5)
    assert completion.ahead() == 5
    assert not completion.done
    with pytest.raises(RuntimeError, match="not done"):
        completion.result()
    driver.play()
    assert waited(completion) == 5


def test_operations_are_launched_on_their_stream_and_one_after_the_other() -> None:
    driver = PlayedDriver()
    stream, other = CudaStream(driver, "compute", first=True), CudaStream(driver, "out")
    seen: list[object] = []
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        inside.set()
        assert go_on.wait(10)
        seen.append("first")

    thread = threading.Thread(target=lambda: stream.run(first))
    thread.start()
    assert inside.wait(10)
    behind = threading.Thread(target=lambda: stream.run(lambda: seen.append("second")))
    behind.start()
    waited(other.run(lambda: seen.append("beside")))
    go_on.set()
    thread.join(10)
    behind.join(10)
    assert seen == ["beside", "first", "second"]
    kinds: list[str] = []
    waited(stream.run(lambda: kinds.append(driver.current[-1][0])))
    waited(other.run(lambda: kinds.append(driver.current[-1][0])))
    assert kinds == ["first", "later"]


def test_a_callers_mistake_is_known_at_once_and_another_error_when_what_was_launched_has_ended() -> None:
    driver = PlayedDriver(by_hand=True)
    stream = CudaStream(driver, "compute")

    def fail(error: Exception) -> None:
        raise error

    mistake = stream.run(lambda: fail(BadRequest("no")))
    assert isinstance(mistake.error, BadRequest)
    failed = stream.run(lambda: fail(RuntimeError("no memory")))
    assert not failed.done
    assert failed.error is None
    with pytest.raises(RuntimeError, match="no memory"):
        failed.ahead()
    driver.play()
    with pytest.raises(RuntimeError, match="no memory"):
        waited(failed)


def test_what_an_operation_has_is_kept_until_it_is_done_and_no_longer() -> None:
    driver = PlayedDriver(by_hand=True)
    stream = CudaStream(driver, "out")
    thing = Thing()
    kept = weakref.ref(thing)
    completion = stream.run(lambda thing=thing: None)  # type: ignore[misc]
    del thing
    gc.collect()
    assert kept() is not None
    driver.play()
    waited(completion)
    eventually_sync(lambda: gc.collect() >= 0 and kept() is None)


def test_what_a_failed_operation_had_is_kept_until_it_is_done_and_not_by_its_error() -> None:
    """What failed for lack of memory is computed again in parts, with the error in hand."""
    driver = PlayedDriver(by_hand=True)
    stream = CudaStream(driver, "compute")
    kept: list[weakref.ref[Thing]] = []

    def fail() -> None:
        thing = Thing()
        kept.append(weakref.ref(thing))
        raise RuntimeError("no memory")

    completion = stream.run(fail)
    assert kept[0]() is not None, "what was launched before may still read or write it"
    driver.play()
    with pytest.raises(RuntimeError, match="no memory") as caught:
        waited(completion)
    assert kept[0]() is None
    assert "in fail" in "".join(traceback.format_exception(caught.value))


def test_an_error_is_in_no_circle() -> None:
    driver = PlayedDriver(by_hand=True)
    stream = CudaStream(driver, "compute")
    thing = Thing()
    kept = weakref.ref(thing)

    def fail(thing: Thing = thing) -> None:
        raise RuntimeError(f"of {thing}")

    gc.collect()
    gc.disable()
    try:
        completion = stream.run(fail)
        driver.play()
        done = threading.Event()
        completion.then(done.set)
        assert done.wait(10)
        del completion, thing, fail
        eventually_sync(lambda: kept() is None, 5.0)
    finally:
        gc.enable()


async def test_who_has_caught_an_error_goes_on() -> None:
    """Its frame is in the traceback of the error, which a second operation ends with."""
    stream = CudaStream(PlayedDriver(), "compute")

    def fail() -> None:
        raise RuntimeError("no memory")

    first, go_on = stream.run(fail), asyncio.Event()

    async def catch() -> str:
        try:
            await landed(first)
        except RuntimeError as error:
            await go_on.wait()
            return str(error)
        return ""

    catching = asyncio.create_task(catch())
    await asyncio.sleep(0.05)
    with pytest.raises(RuntimeError):
        await landed(stream.run(first.ahead))
    go_on.set()
    assert await asyncio.wait_for(catching, 10.0) == "no memory"


def test_a_device_that_fails_fails_what_was_launched() -> None:
    driver = PlayedDriver(by_hand=True)
    stream = CudaStream(driver, "compute")
    completions = [stream.run(lambda: 1) for _ in range(2)]
    driver.failure = RuntimeError("an illegal memory access was encountered")
    driver.play()
    for completion in completions:
        with pytest.raises(RuntimeError, match="illegal"):
            waited(completion)


def test_the_devices_time_of_an_operation_is_without_the_wait_before_it() -> None:
    driver = PlayedDriver(by_hand=True)
    stream = CudaStream(driver, "compute")
    completion = stream.run(lambda: None)
    began, ended = driver.recorded
    driver.now_ms = 100.0
    began.come()
    driver.now_ms = 107.5
    ended.come()
    waited(completion)
    assert completion.device_s == stream.busy_s == pytest.approx(0.0075)
