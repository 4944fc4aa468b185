"""``blitzscale top`` in a terminal and without one, on the feed of a gateway that breaks off, dies and lies."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from compose.admin import AdminClient
from compose.cli import run
from compose.cli.feed_tables import parts
from compose.cli.tables import Lines
from compose.feed import EventSplitter, ShownState
from compose.feed_reader import FeedReader
from tests.wait_until import eventually, eventually_sync

OPERATION = {
    "kind": "scale_record.v1", "plan_id": "plan-1", "model": "demo", "status": "running", "direction": "out",
    "desired": 2, "reason": "[red]asked\u001b[2J for 2", "triggered_at_s": 1_800_000_000.0,
    "targets": [{"worker_id": "worker-1", "instance_id": "i-1", "layer_ready_ms": [1.0]}],
}  # fmt: skip
ENTITIES: dict[str, Any] = {
    "cluster/now": {"workers": 2, "states": {"serving": 1, "loading": 1}, "silent": ["monitor"]},
    "model/demo": {"name": "demo", "layers": 8, "bytes": 10 << 20, "min": 1, "max": 1_000_000, "waiting": 7,
                   "running": 5, "tokens_per_s": 12.4, "ttft_p50_ms": 40.0, "ttft_p99_ms": 90.25,
                   "states": {"colocated serving": 1, "prefill loading": 1}},
    "worker/worker-0": {"id": "worker-0", "state": "serving", "model": "demo", "role": "colocated", "layers": 8,
                        "running": 5, "queued": 4, "kv_used": 1, "kv_total": 4},
    "worker/worker-1": {"id": "worker-1", "state": "loading", "model": "demo", "role": "prefill", "layers": 2},
    "operation/plan-1": OPERATION,
    "load/plan-1/worker-1": {"plan": "plan-1", "worker": "worker-1", "layers": 2, "bytes": 500_000_000, "after_s": 2.0},
    "move/demo/worker-0/worker-1": {"model": "demo", "from": "worker-0", "to": "worker-1", "requests": 41},
    "gpu_time/demo": {"model": "demo", "seconds": {"serving": 3600.0}, "cost": 2.5},
    "unplanned/demo/colocated": {"model": "demo", "role": "colocated", "wanted": 3, "why": "no worker is spare"},
}  # fmt: skip


def event(kind: str, number: int, data: Any) -> bytes:
    return f"event: {kind}\nid: run-{number}\ndata: {json.dumps(data)}\n\n".encode()


SNAPSHOT = event("snapshot", 1, {"entities": ENTITIES, "is_cut": False})


@dataclass
class FakeFeed:
    """What each connection is sent, one after the other, before it breaks off. After them one stays open, where
    ``stays`` is set."""

    url: str = ""
    connections: list[bytes] = field(default_factory=list)
    last_ids: list[str | None] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    stays: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def fake_feed(*connections: bytes) -> Iterator[FakeFeed]:
    feed = FakeFeed(connections=list(connections))
    feed.stays.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            feed.last_ids.append(self.headers.get("Last-Event-ID"))
            feed.keys.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            if feed.connections:
                self.wfile.write(feed.connections.pop(0))
            if not feed.connections and feed.stays.is_set():
                self.wfile.write(b": alive\n\n")
                feed.over.wait()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    feed.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield feed
    finally:
        feed.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def terminal(url: str) -> Iterator[tuple[subprocess.Popen[bytes], bytearray]]:
    """``top`` in a terminal of its own, and what it has drawn so far."""
    mine, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "compose", "top", "--url", url],
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(its)
    drawn = bytearray()

    def read() -> None:
        try:
            while data := os.read(mine, 65536):
                drawn.extend(data)
        except OSError:
            pass  # the terminal's other end is closed

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield process, drawn
    finally:
        process.kill()
        process.wait()
        reader.join()
        os.close(mine)


def test_without_a_terminal_one_state_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("BLITZ_ADMIN_KEY", "a-key")
    with fake_feed(SNAPSHOT) as feed:
        assert run(["top", "--url", feed.url]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for line in (
        "2 workers: 1 loading, 1 serving; silent: monitor",
        "demo, more instances: running (plan-1)",
        "because [red]asked[2J for 2",
        "worker-1 loads 2/8 #####............... 2.00 Gbit/s -",
        "demo 1 serving, 1 prefill loading 1 - 7 5 40.0/90.2 - 12 10.0",
        "demo: 3 colocated wanted, and not possible now: no worker is spare",
        "worker-0 serving demo colocated 8/8 5 4 25 % -",
        "demo worker-0 worker-1 41",
    ):
        assert line in lines, shown
    assert feed.keys == ["Bearer a-key"]


def test_on_a_narrow_terminal_columns_go_and_ids_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with fake_feed(SNAPSHOT) as feed:
        assert run(["top", "--once", "--url", feed.url]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 60
    assert "worker-0  serving  demo   8/8     5        4" in shown


def test_as_json_with_once_there_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_feed(SNAPSHOT) as feed:
        assert run(["top", "--once", "--json", "--url", feed.url]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"event_id": "run-1", "is_cut": False, "entities": ENTITIES}


def test_as_json_each_change_is_a_document_until_it_is_interrupted() -> None:
    frame = event("frame", 2, {"changed": {}, "gone": ["worker/worker-1"]})
    with fake_feed(SNAPSHOT, frame) as feed:
        process = subprocess.Popen(
            [sys.executable, "-m", "compose", "top", "--json", "--url", feed.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        found = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
    assert [one["event_id"] for one in found] == ["run-1", "run-2"]
    assert found[1]["entities"] == {name: value for name, value in ENTITIES.items() if name != "worker/worker-1"}
    assert feed.last_ids == [None, "run-1"], "it went on from where it was"
    assert (process.returncode, rest) == (0, "")
    assert errors.splitlines() == ["disconnected: the gateway ended the feed", "connected again"]


async def test_after_an_event_that_makes_no_sense_the_feed_is_read_from_its_beginning() -> None:
    broken = event("frame", 2, {"changed": {"model/demo": 7}})
    with fake_feed(SNAPSHOT, broken, SNAPSHOT) as feed:
        async with AdminClient(feed.url) as client:
            reading = asyncio.create_task(FeedReader(client).keep_reading())
            await eventually(lambda: len(feed.last_ids) == 3)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    assert feed.last_ids == [None, "run-1", None]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_in_a_terminal_it_says_that_it_is_disconnected_and_leaves_the_terminal_as_it_was(how: signal.Signals) -> None:
    with fake_feed(SNAPSHOT) as feed:
        feed.stays.clear()
        _break_off(feed, how)


def _break_off(feed: FakeFeed, how: signal.Signals) -> None:
    with terminal(feed.url) as (process, drawn):
        eventually_sync(lambda: b"disconnected, what you see is the last that was known" in drawn)
        feed.stays.set()
        eventually_sync(lambda: re.search(rb"disconnected.*live.*worker-0", drawn, re.DOTALL))
        process.send_signal(how)
        assert process.wait() == 0
        eventually_sync(lambda: b"\x1b[?1049l" in drawn)
    assert b"Traceback" not in drawn


def test_in_a_terminal_a_gateway_that_knows_nothing_has_no_cluster_without_models() -> None:
    with fake_feed() as feed, terminal(feed.url) as (_, drawn):
        eventually_sync(lambda: b"the gateway says nothing of the cluster yet" in drawn)
        assert b"no model is registered" not in drawn


def test_what_is_no_feed_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_feed(event("snapshot", 1, {"entities": {"model/demo": 7}})) as feed:
        assert run(["top", "--url", feed.url]) == 1
    assert capsys.readouterr().err.startswith("error: the gateway's feed is none that this command knows")


def test_figures_and_texts_of_a_hostile_feed_do_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    target = {"worker_id": "w\u001b]0;x\u0007", "instance_id": "i", "failure": "[bold]\u001b[2J" + "long " * 2000}
    worker = {"id": "w", "model": "demo", "layers": -(10**12), "running": -1, "kv_used": 5, "kv_total": -7}
    entities = {
        "cluster/now": {"workers": -1, "summarised": True},
        "model/demo": {"name": "demo", "layers": -(10**12), "max": -5},
        "worker/w": worker,
        "operation/p": OPERATION | {"plan_id": "p", "triggered_at_s": 1e300, "targets": [target]},
        "load/p/w": {"plan": "p", "worker": "w", "layers": 10**18, "bytes": -1, "after_s": -1.0},
    }
    with fake_feed(event("snapshot", 1, {"entities": entities})) as feed:
        assert run(["top", "--url", feed.url]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[bold]" in "".join(line.strip() for line in shown.splitlines())
    assert len(shown) < 200_000


def test_of_a_large_cluster_as_many_rows_are_laid_out_as_are_asked_for() -> None:
    entities = {f"worker/w-{i:03}": {"id": f"w-{i:03}", "state": "spare"} for i in range(200)}
    entities |= {f"model/m-{i:03}": {"name": f"m-{i:03}"} for i in range(100)}
    state, console = ShownState(), Console(width=100, record=True, file=io.StringIO())
    (found,) = EventSplitter().feed(event("snapshot", 1, {"entities": entities}))
    state.take(found)
    console.print(Lines(parts(state, console, 4), 12))
    lines = [line.split()[:2] for line in console.export_text().splitlines()]
    assert lines[:7] == [["Models"], ["name", "instances"], *([f"m-{i:03}", "none"] for i in range(4)), ["and", "96"]]
    assert lines[7:] == [["Workers"], ["id", "state"], ["w-000", "spare"], ["w-001", "spare"], ["...", "and"]]


def test_targets_of_what_is_done_have_rates_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    targets = [
        {"worker_id": f"worker-{gbps:.0f}", "instance_id": "i", "serving_ms": 9.0, "gbps": gbps} for gbps in (2.0, 3.0)
    ]
    done = OPERATION | {"status": "done", "gbps": 2.0, "targets": targets}
    with fake_feed(event("snapshot", 1, {"entities": ENTITIES | {"operation/plan-1": done}, "is_cut": False})) as feed:
        assert run(["top", "--once", "--url", feed.url]) == 0
    shown = capsys.readouterr().out
    assert "3.00 Gbit/s" in shown
    assert shown.count("2.00 Gbit/s") == 1


def test_on_a_very_narrow_terminal_workers_can_be_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with fake_feed(SNAPSHOT) as feed:
        assert run(["top", "--once", "--url", feed.url]) == 0
    shown = capsys.readouterr().out
    assert "worker-0  serving  demo" in shown
    assert "worker-1  loading  demo" in shown
