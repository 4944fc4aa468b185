"""Row ``ipc``: bytes between two processes of one host that hold device memory.

First CUDA's own way, a handle that another process opens. Then UCX as the worker drives it
(``shared.transport.ucx_worker``): which of its transports it takes, how fast, whether a thread that sleeps is woken,
and what is left of a receiver whose sender is killed amid a transfer. Both processes use the same device.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.gpu.figures import Report
from bench.gpu.processes import SecondProcess, second_process
from bench.gpu.timing import gbytes_per_s, median_ms

SIZES = (256 << 10, 1 << 20, 8 << 20, 64 << 20)
BUFFER_BYTES = 256 << 20
MOST_BYTES = 4 << 30
MOST_MESSAGES = 1024
WINDOW = 4
"""Messages in flight."""
WAIT_S = 0.05
"""For how long a sleeping thread waits at most: what it finds then and was not woken for counts as a lost wake-up."""
SHOWN_LINES = 3


@dataclass(frozen=True, slots=True)
class _Job:
    """What the sender is to do."""

    receiver: bytes
    """The worker address."""
    size: int
    num_messages: int
    place: str
    blocking: bool
    same_host: bool
    first_tag: int


class _Pump:
    """One UCX worker and what the thread that owns it does until something has happened."""

    def __init__(self) -> None:
        import torch

        from shared.transport.ucx_worker import open_worker

        torch.cuda.synchronize()  # UCX finds the context of this thread
        self.worker = open_worker(device_memory=True)
        self.num_lost = 0

    def until(
        self,
        done: Callable[[], bool],
        *,
        blocking: bool,
        limit_s: float = 20.0,
        arrived: Callable[[Any], None] | None = None,
    ) -> bool:
        """Let UCX work until ``done``, or the limit is over; whether it is done. ``arrived`` gets messages."""
        end_s = time.monotonic() + limit_s
        was_woken = True
        while not done():
            if time.monotonic() > end_s:
                return False
            progressed = self.worker.progress()
            while arrived is not None and (message := self.worker.probe()) is not None:
                progressed = True
                arrived(message)
            self.worker.end_completed()
            if progressed:
                self.num_lost += not was_woken
                was_woken = True
            elif blocking and not done() and self.worker.arm():
                was_woken = bool(select.select([self.worker.event_fd], [], [], WAIT_S)[0])
        return True


def _buffer(place: str) -> Any:
    """The same random bytes in every process."""
    import torch

    torch.manual_seed(5)
    memory = torch.randint(256, (BUFFER_BYTES,), dtype=torch.uint8, device="cuda")
    if place == "host":
        return torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True).copy_(memory)
    return memory


def _part(buffer: Any, size: int, tag: int) -> Any:
    begin = tag % (BUFFER_BYTES // size) * size
    return buffer[begin : begin + size]


def _bytes(tensor: Any) -> Any:
    """As ucxx takes it: PyTorch's tensors in host memory are no buffers."""
    return tensor if tensor.is_cuda else tensor.numpy()


def _to_file(file: Path) -> None:
    """What this process prints from now on, libraries included: UCX tells there which transports it takes."""
    target = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)


def _sender(pipe: Connection, log: Path) -> None:
    import torch

    _to_file(log)
    buffers = {place: _buffer(place) for place in ("device", "host")}
    torch.cuda.synchronize()
    pump = _Pump()
    endpoints: dict[tuple[bytes, bool], Any] = {}
    pipe.send("ready")
    while True:
        try:
            job: _Job = pipe.recv()
        except EOFError:
            return
        key = (job.receiver, job.same_host)
        if key not in endpoints:
            endpoints[key] = pump.worker.endpoint(job.receiver, same_host=job.same_host)
        pump.num_lost = 0
        try:
            _send_all(pump, job, endpoints[key], buffers[job.place])
            pipe.send(pump.num_lost)
        except Exception as error:  # noqa: BLE001 - the receiver reports it
            pipe.send(f"{type(error).__name__}: {error}")


def _send_all(pump: _Pump, job: _Job, endpoint: Any, buffer: Any) -> None:
    ended: list[Exception | None] = []
    posted = 0
    while len(ended) < job.num_messages:
        while posted < job.num_messages and posted - len(ended) < WINDOW:
            tag = job.first_tag + posted
            posted += 1
            pump.worker.send(endpoint, pump.worker.array(_bytes(_part(buffer, job.size, tag))), tag, ended.append)
        count = len(ended)
        if not pump.until(lambda count=count: len(ended) > count, blocking=job.blocking):  # type: ignore[misc]
            raise TimeoutError(f"{len(ended)} of {job.num_messages} messages had left")
    errors = [error for error in ended if error is not None]
    if errors:
        raise errors[0]


def measure(report: Report) -> None:
    with report.part("CUDA's own handles"):
        _measure_handles(report)
    # Read by UCX when it is loaded, here and in the senders: it then tells which protocol it takes for what.
    os.environ["UCX_PROTO_INFO"] = "y"
    _to_file(report.folder / "ucx-receiver.log")
    _measure_ucx(report, report.folder / "ucx-sender.log")


def _exporter(pipe: Connection) -> None:
    import cupy

    runtime = cupy.cuda.runtime
    memory = cupy.cuda.Memory(BUFFER_BYTES)
    numbers = cupy.ndarray(BUFFER_BYTES // 8, dtype=cupy.int64, memptr=cupy.cuda.MemoryPointer(memory, 0))
    numbers[...] = cupy.arange(numbers.size)
    runtime.deviceSynchronize()
    pipe.send(runtime.ipcGetMemHandle(memory.ptr))
    try:
        pipe.recv()
    except EOFError:
        return


def _measure_handles(report: Report) -> None:
    import cupy
    import torch

    runtime = cupy.cuda.runtime
    target = torch.empty(BUFFER_BYTES // 8, dtype=torch.int64, device="cuda")
    expected = torch.arange(BUFFER_BYTES // 8, device="cuda")
    with second_process(_exporter) as peer:
        handle = peer.answer()
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        address = runtime.ipcOpenMemHandle(handle)
        report.number("to open another process's handle", (time.perf_counter() - begin_s) * 1000, "ms", "256 MiB")

        def copy(_: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            runtime.memcpyAsync(target.data_ptr(), address, BUFFER_BYTES, runtime.memcpyDeviceToDevice, stream)

        rate = gbytes_per_s(BUFFER_BYTES, median_ms(copy))
        is_right = torch.equal(target, expected)
        report.number("copy out of it", rate, "GB/s", f"counted once; the bytes are {'right' if is_right else 'WRONG'}")
        peer.process.kill()
        peer.process.join()
        target.zero_()
        copy(0)
        torch.cuda.synchronize()
        is_right = torch.equal(target, expected)
        report.text(
            "after its owner was killed", f"the copy succeeds, the bytes are {'right' if is_right else 'wrong'}"
        )
        runtime.ipcCloseMemHandle(address)


def _measure_ucx(report: Report, log: Path) -> None:
    import torch

    targets = {place: _buffer(place) for place in ("device", "host")}
    expected = targets["device"].clone()
    pump = _Pump()
    ways = [("device", "device"), ("device", "host"), ("host", "device")]
    with second_process(_sender, log) as peer:
        peer.answer()
        first_tag = 1
        for same_host in (True, False):
            for source, target in ways:
                for blocking in (False, True):
                    if blocking and (source, target) != ("device", "device"):
                        continue
                    for size in SIZES:
                        name = (
                            f"UCX {source} to {target}, {_size_name(size)}, {'blocking' if blocking else 'polling'}"
                            f"{'' if same_host else ', error handling'}"
                        )
                        if not same_host and size not in (1 << 20, 64 << 20):
                            continue
                        with report.part(name):
                            seen = log.stat().st_size if log.exists() else 0
                            job = _Job(
                                pump.worker.address,
                                size,
                                min(MOST_MESSAGES, MOST_BYTES // size),
                                source,
                                blocking,
                                same_host,
                                first_tag,
                            )
                            first_tag += job.num_messages
                            _receive(report, name, pump, peer, job, targets[target], expected)
                            _report_protocol(report, name, log, seen)
    for same_host in (True, False):
        with report.part(f"killed sender, {'no ' if same_host else ''}error handling"):
            _measure_kill(report, pump, targets["device"], expected, same_host=same_host, first_tag=first_tag)
            first_tag += 2 * MOST_MESSAGES
    torch.cuda.synchronize()


def _size_name(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _receiving(pump: _Pump, size: int, target: Any, ended: list[Exception | None]) -> Callable[[Any], None]:
    def arrived(message: Any) -> None:
        part = _part(target, size, message.sender_tag.value)
        pump.worker.receive(message, pump.worker.array(_bytes(part)), ended.append)

    return arrived


def _receive(
    report: Report, name: str, pump: _Pump, peer: SecondProcess, job: _Job, target: Any, expected: Any
) -> None:
    import torch

    # By one thread: those of PyTorch spin for a while after it, and would count as CPU of the transfer.
    target.zero_() if target.is_cuda else target.numpy().fill(0)
    torch.cuda.synchronize()
    ended: list[Exception | None] = []
    pump.num_lost = 0
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    peer.order(job)
    arrived = _receiving(pump, job.size, target, ended)
    # The sender answers when it is done, or has failed, which may be before all has come.
    pump.until(lambda: len(ended) >= job.num_messages or peer.pipe.poll(), blocking=job.blocking, arrived=arrived)
    lost = peer.answer() if peer.pipe.poll() else None
    if isinstance(lost, str):
        raise RuntimeError(f"the sender: {lost}")
    pump.until(lambda: len(ended) >= job.num_messages, blocking=job.blocking, arrived=arrived)
    taken_s = time.perf_counter() - begin_s
    cpu_s = time.process_time() - cpu_s
    if len(ended) < job.num_messages:
        raise TimeoutError(f"{len(ended)} of {job.num_messages} messages had come")
    lost = peer.answer() if lost is None else lost
    errors = [error for error in ended if error is not None]
    if errors:
        raise errors[0]
    torch.cuda.synchronize()
    num_bytes = min(job.num_messages * job.size, BUFFER_BYTES)
    is_right = num_bytes < BUFFER_BYTES or torch.equal(target.to("cuda"), expected)
    note = f"{job.num_messages} messages, receiver's CPU {cpu_s / taken_s:.0%}"
    if job.blocking:
        note += f", lost wake-ups {pump.num_lost} and {lost}"
    note += "" if is_right else ", bytes WRONG"
    report.number(name, job.num_messages * job.size / taken_s / 1e9, "GB/s", note)


def _report_protocol(report: Report, name: str, log: Path, seen: int) -> None:
    """What the sender's UCX has told since the log had that size, of large messages: it tells once for each kind."""
    text = log.read_bytes()[seen:].decode(errors="replace")
    lines = [" ".join(line.split("|", 1)[1].split()) for line in text.splitlines() if "|" in line and "inf |" in line]
    if lines:
        report.text(f"{name}: protocols", " ; ".join(dict.fromkeys(lines[-SHOWN_LINES:])))


def _measure_kill(report: Report, pump: _Pump, target: Any, expected: Any, *, same_host: bool, first_tag: int) -> None:
    """The sender dies while messages of 64 MiB are on their way. Then another one sends."""
    import torch

    how = "no error handling" if same_host else "error handling"
    size = SIZES[-1]
    ended: list[Exception | None] = []
    arrived = _receiving(pump, size, target, ended)
    job = _Job(pump.worker.address, size, MOST_MESSAGES, "device", False, same_host, first_tag)
    with second_process(_sender, report.folder / "ucx-killed.log") as peer:
        peer.answer()
        peer.order(job)
        if not pump.until(lambda: len(ended) >= 8, blocking=False, arrived=arrived):
            raise TimeoutError("nothing came before the kill")
        os.kill(peer.process.pid, signal.SIGKILL)
        peer.process.join()
    whole = len(ended)
    begin_s = time.perf_counter()
    # Not ``busy``: what has not arrived is not in flight. Whether anything hangs shows after some seconds.
    pump.until(lambda: False, blocking=False, limit_s=3.0, arrived=arrived)
    taken_s = time.perf_counter() - begin_s
    errors = [str(error) for error in ended if error is not None]
    state = f"{whole} messages before, {len(ended)} after {taken_s:.0f} s, {len(errors)} of them with an error"
    report.text(
        f"killed sender, {how}",
        f"{state}{': ' + errors[0][:80] if errors else ''}; receives that hang: {'yes' if pump.worker.busy else 'no'}",
    )
    try:
        total = int(torch.ones(1 << 20, device="cuda").sum())
        torch.cuda.synchronize()
        state = "usable" if total == 1 << 20 else "WRONG results"
    except RuntimeError as error:
        state = f"lost: {error}"
    report.text(f"the receiver's device afterwards, {how}", state)
    with second_process(_sender, report.folder / "ucx-after.log") as peer:
        peer.answer()
        again = _Job(pump.worker.address, size, 16, "device", False, same_host, first_tag + MOST_MESSAGES)
        _receive(report, f"another sender afterwards, {how}", pump, peer, again, target, expected)
