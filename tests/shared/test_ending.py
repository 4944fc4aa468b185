"""The end of a process: everything closes, or is left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest

from shared.ending import closed, end_last_tasks
from tests.wait_until import WAIT_S, eventually

PREAMBLE = """
import asyncio, ctypes, sys, threading, time
import shared.process
from shared.process import run_service
async def up(lifecycle):
    lifecycle.ready = True
    print("up", flush=True)
    await lifecycle.wait_stopping()
async def deaf():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
"""


def stopped(code: str, *, within_s: float) -> tuple[int, str]:
    """Run a service up to SIGTERM, which gives it so much time to end; its exit code and what it said."""
    limits = f"shared.process.CLOSING_S = shared.process.EXIT_S = {within_s}"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{PREAMBLE}\n{limits}\n{code}\nsys.exit(run_service('demo', main, drain_s=0.2))"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=2 * WAIT_S)
        return process.returncode, said
    finally:
        process.kill()
        process.communicate()


def test_a_service_ends_though_a_task_of_it_does_not() -> None:
    code, said = stopped(
        "async def main(lifecycle):\n    lifecycle.task = asyncio.create_task(deaf())\n    await up(lifecycle)",
        within_s=WAIT_S,
    )
    assert code == 0
    assert "ending without deaf, which did not end" in said


def test_a_service_ends_though_work_in_a_thread_of_it_does_not() -> None:
    code, said = stopped(
        "async def main(lifecycle):\n"
        "    lifecycle.work = asyncio.ensure_future(asyncio.to_thread(threading.Event().wait))\n"
        "    await up(lifecycle)",
        within_s=WAIT_S,
    )
    assert code == 0
    assert "ending without work in threads, which did not end" in said


def test_a_service_ends_though_what_it_does_at_the_end_never_returns() -> None:
    code, said = stopped(
        "async def main(lifecycle):\n    await up(lifecycle)\n    await asyncio.sleep(3600)", within_s=1.0
    )
    assert code == 1
    assert "Timeout" in said


def test_a_service_ends_though_a_native_call_holds_the_interpreter_for_ever() -> None:
    # In which it has come to that call.
    code, said = stopped(
        "async def main(lifecycle):\n    await up(lifecycle)\n    ctypes.PyDLL(None).sleep(3600)", within_s=5.0
    )
    assert code == 1
    assert "in main" in said, "it shows where it hung"


def test_a_service_ends_though_a_thread_that_nobody_owns_does_not() -> None:
    code, said = stopped(
        "async def main(lifecycle):\n"
        "    threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        "    await up(lifecycle)",
        within_s=1.0,
    )
    assert code == 1
    assert "Timeout" in said


async def _never() -> None:
    await asyncio.Event().wait()


async def _breaks() -> None:
    raise ValueError("broken")


def test_a_process_ends_though_the_interpreters_own_end_would_take_for_ever() -> None:
    code = "import atexit, time; from shared.ending import end_process; atexit.register(time.sleep, 3600)"
    code += "; print('said', end=''); end_process(7)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (7, b"said")


async def test_a_part_that_does_not_close_is_named_and_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert await closed("the quick", asyncio.sleep(0))
        assert not await closed("the slow", _never(), 0.01)
        assert not await closed("the faulty", _breaks())
    assert [r.getMessage() for r in caplog.records] == [
        "the slow did not close within 0.01 s: left behind",
        "the faulty did not close: broken",
    ]


async def test_several_parts_that_are_left_behind_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # what others have left
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert not await closed("the slow", asyncio.gather(_never(), _never()), 0.01)
        await asyncio.sleep(0.01)
        gc.collect()
    assert [r.getMessage() for r in caplog.records] == ["the slow did not close within 0.01 s: left behind"]


async def test_tasks_and_threads_that_are_left_end_or_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.ending.LAST_TASKS_S", 0.2)
    begun, let_go, calm = threading.Event(), threading.Event(), asyncio.create_task(_never())

    def work() -> None:
        begun.set()
        let_go.wait()

    stubborn = asyncio.create_task(_stubborn(let_go))
    working = asyncio.ensure_future(asyncio.to_thread(work))
    await eventually(begun.is_set)
    try:
        assert await end_last_tasks() == ["_stubborn", "work in threads"]
        assert calm.cancelled()
    finally:
        let_go.set()
        await asyncio.gather(stubborn, working, return_exceptions=True)


async def _stubborn(until: threading.Event) -> None:
    while not until.is_set():
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue
