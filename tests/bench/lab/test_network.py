from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bench.lab import goodput, system
from bench.lab.checkpoint import make_checkpoint
from bench.lab.errors import LabFailed, LabUnavailable
from bench.lab.network import LOCK, Network
from bench.lab.plan import PREFIX, Rate
from bench.lab.stack import LabStack
from compose.ports import free_port
from shared.checkpoint import inspect_checkpoint
from tests.wait_until import eventually_sync


@pytest.fixture(autouse=True)
def _one_lab_at_a_time() -> None:
    """Tests of two checkouts may run at once; the machine has one lab."""
    try:
        with LOCK.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pytest.skip("another lab runs on this machine")
    except OSError:
        return  # no such folder, or not ours: the test's own checks say so


RATE = Rate.parse("500mbit")
needs_root = pytest.mark.skipif(bool(system.missing()), reason=system.missing() or "a lab can be made")


def left_behind() -> list[str]:
    return [name for name in [*system.namespaces(), *system.links()] if name.startswith(PREFIX)]


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(LabUnavailable, match=r"tc.*iproute2"):
        system.require()


def test_without_root_no_lab_is_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(system, "run", lambda command: pytest.fail(f"{command} was run"))
    with pytest.raises(LabUnavailable, match="root"), Network(2, RATE, lock=tmp_path / "lock"):
        pass


@pytest.mark.root
@needs_root
def test_addresses_that_are_in_use_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system, "routes", lambda: [("default", "eth0"), ("10.192.0.0/11", "vpn0")])
    with pytest.raises(LabUnavailable, match=r"10\.192\.0\.0/11 on vpn0"), Network(2, RATE):
        pass
    assert not left_behind()


@pytest.mark.root
@needs_root
def test_dropped_bridge_traffic_is_explained_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropped(*args: object, **kwargs: object) -> goodput.Goodput:
        raise LabUnavailable("no TCP connection")

    monkeypatch.setattr(goodput, "measure", dropped)
    monkeypatch.setattr(system, "bridged_traffic_is_filtered", lambda: True)
    with pytest.raises(LabUnavailable, match=r"no TCP connection.*dockerd"), Network(2, RATE):
        pass
    assert not left_behind()


def test_a_failed_command_says_what_it_said() -> None:
    with pytest.raises(LabUnavailable, match="no such thing"):
        system.run((sys.executable, "-c", "raise SystemExit('no such thing')"))


def test_a_plain_transfer_is_timed() -> None:
    port, num_bytes = free_port(), 3 * goodput.PIECE_BYTES + 1
    sending = threading.Thread(target=goodput.send, args=("127.0.0.1", port, num_bytes))
    sending.start()
    try:
        assert goodput.receive("127.0.0.1", port, num_bytes) > 0
    finally:
        sending.join()


def test_a_sender_that_ends_early_is_noticed() -> None:
    port = free_port()
    sending = threading.Thread(target=goodput.send, args=("127.0.0.1", port, 1000))
    sending.start()
    try:
        with pytest.raises(EOFError, match="500 bytes early"):
            goodput.receive("127.0.0.1", port, 1500)
    finally:
        sending.join()


@pytest.mark.root
@pytest.mark.stack
@pytest.mark.ucx
@needs_root
async def test_two_hosts_scale_out_over_the_rated_link_and_nothing_stays(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "models", 16)
    num_bytes = inspect_checkpoint(checkpoint, with_hash=False).layout.num_bytes
    with Network(2, RATE) as network:
        reached = [network.goodput(16 << 20).gbps]
        while reached[-1] <= 0.85 * RATE.gbps:
            # One end was not run for a moment.
            assert len(reached) < 10, reached
            reached.append(network.goodput(16 << 20).gbps)
        assert max(reached) < 1.02 * RATE.gbps
        with pytest.raises(LabUnavailable, match="another lab"), Network(2, RATE):
            pass
        # No host copies: their own way over the link would be counted, too.
        state = tmp_path / "state"
        async with LabStack(network, state, checkpoint, weights_bytes=num_bytes, copies_on=()) as stack:
            before = network.received_bytes()
            record = await stack.scale(2, timeout_s=240)
            (target,) = record.targets
            host = stack.host_of(target.worker_id)
            network.require_received(before, {host: num_bytes})
            # From the trigger, so that it does not matter what a report calls the first byte.
            assert target.serving_ms is not None
            assert target.serving_ms / 1000 > RATE.seconds(num_bytes) * 0.98
            with pytest.raises(LabFailed, match=network.hosts[host].namespace):
                network.require_received(before, {host: 2 * num_bytes})
    assert not left_behind()


@pytest.mark.root
@needs_root
def test_a_killed_run_is_cleaned_up_by_the_next() -> None:
    code = "import time; from bench.lab.network import LOCK, Network; from bench.lab.plan import Rate\n"
    code += "with Network(3, Rate.parse('1gbit')): print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "up\n"
        killed.kill()
    namespace = next(name for name in left_behind() if name.startswith(f"{PREFIX}-h"))
    with subprocess.Popen(["ip", "netns", "exec", namespace, "sleep", "600"]) as straggler:
        # Inside, not only started: ``ip`` enters the namespace before it becomes ``sleep``.
        eventually_sync(lambda: str(straggler.pid) in system.run(("ip", "netns", "pids", namespace)).split())
        with Network(2, RATE):
            assert straggler.wait(60) != 0
            assert len([name for name in system.namespaces() if name.startswith(PREFIX)]) == 2
    assert not left_behind()
