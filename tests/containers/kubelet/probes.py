"""Probes of a container, by their periods, timeouts and thresholds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.containers.kubelet.fields import Fields

_OK = range(200, 400)


@dataclass(frozen=True, slots=True)
class Probe:
    command: list[str] | None
    path: str | None
    """To ask for by HTTP; without it and a command: only to connect."""
    port: str | int
    period_s: float
    timeout_s: float
    failures: int
    delay_s: float


def probe_of(doc: Mapping[str, Any] | None) -> Probe | None:
    """Raises ``UnknownField``."""
    if doc is None:
        return None
    probe = Fields(doc, "probe")
    ways = {way: probe.part(way) for way in ("exec", "httpGet", "tcpSocket") if way in doc}
    (way,) = ways
    how = ways[way]
    found = Probe(
        how.take("command") if way == "exec" else None,
        how.take("path") if way == "httpGet" else None,
        how.take("port") if way != "exec" else 0,
        probe.take("periodSeconds", 10),
        probe.take("timeoutSeconds", 1),
        probe.take("failureThreshold", 3),
        probe.take("initialDelaySeconds", 0),
    )
    how.end()
    probe.end()
    return found


@dataclass(frozen=True, slots=True)
class Target:
    """A container that runs."""

    address: str
    ports: Mapping[str, int]
    execute: Callable[[list[str]], Awaitable[tuple[int, str]]]


async def verdicts(probe: Probe, target: Target) -> AsyncIterator[str]:
    """Why it fails, each time that it counts; empty: it does not. A failure counts after as many as may be in a row."""
    await asyncio.sleep(probe.delay_s)
    failed = 0
    while True:
        why = await _ask(probe, target)
        failed = failed + 1 if why else 0
        if not why or failed >= probe.failures:
            yield why
        await asyncio.sleep(probe.period_s)


async def _ask(probe: Probe, target: Target) -> str:
    """Why it failed; empty: it did not."""
    try:
        async with asyncio.timeout(probe.timeout_s):
            if probe.command is not None:
                code, output = await target.execute(probe.command)
                return f"exit code {code}: {output.strip()[-200:]}" if code else ""
            port = target.ports[probe.port] if isinstance(probe.port, str) else probe.port
            return await _ask_port(target.address, port, probe.path)
    except (OSError, TimeoutError) as error:
        return repr(error)


async def _ask_port(address: str, port: int, path: str | None) -> str:
    reader, writer = await asyncio.open_connection(address, port)
    try:
        if path is None:
            return ""
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}:{port}\r\nConnection: close\r\n\r\n".encode())
        status = (await reader.readline()).decode(errors="replace").split()
        return "" if len(status) > 1 and int(status[1]) in _OK else " ".join(status)
    finally:
        writer.close()
