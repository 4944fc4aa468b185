"""The system's side: running ``ip`` and ``tc``, and whether this machine has what a lab needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.lab.errors import LabUnavailable

_COMMAND_S = 20.0
_TOOLS = ("ip", "tc")


def missing() -> str:
    """Why no lab can be made here: one line for people, empty if one can."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"the lab needs {' and '.join(absent)}, which are not here: install iproute2"
    if os.geteuid() != 0:
        return "the lab makes network namespaces and needs root: run it with sudo"
    return ""


def require() -> None:
    """Raises ``LabUnavailable`` saying what is missing."""
    if reason := missing():
        raise LabUnavailable(reason)


def run(command: Sequence[str]) -> str:
    """Run a command; its output. Raises ``LabUnavailable`` with what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabUnavailable(f"`{' '.join(command)}` failed: {error}") from error
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise LabUnavailable(f"`{' '.join(command)}` failed: {said}")
    return done.stdout


def bridged_traffic_is_filtered() -> bool:
    """Whether frames between a bridge's ports pass through iptables (and so through a dockerd's DROP)."""
    try:
        return Path("/proc/sys/net/bridge/bridge-nf-call-iptables").read_text(encoding="ascii").strip() == "1"
    except OSError:
        return False


class _Statistics(msgspec.Struct, frozen=True):
    bytes: int


class _Directions(msgspec.Struct, frozen=True):
    rx: _Statistics
    tx: _Statistics


class _Link(msgspec.Struct, frozen=True):
    ifname: str
    stats64: _Directions | None = None


class _Namespace(msgspec.Struct, frozen=True):
    name: str


class _Route(msgspec.Struct, frozen=True):
    dst: str
    dev: str = ""


def namespaces() -> list[str]:
    """Names of all network namespaces."""
    return [
        each.name for each in msgspec.json.decode(run(("ip", "-j", "netns", "list")) or "[]", type=list[_Namespace])
    ]


def links() -> list[str]:
    """Names of the root namespace's interfaces."""
    found = msgspec.json.decode(run(("ip", "-j", "link", "show")), type=list[_Link])
    return [each.ifname.partition("@")[0] for each in found]


def routes() -> list[tuple[str, str]]:
    """(destination, device) of the root namespace's routes."""
    found = msgspec.json.decode(run(("ip", "-j", "-4", "route", "show")) or "[]", type=list[_Route])
    return [(each.dst, each.dev) for each in found]


def counters(namespace: str, device: str) -> tuple[int, int]:
    """Bytes (received, sent) by an interface of a namespace since it was made."""
    text = run(("ip", "-n", namespace, "-s", "-j", "link", "show", "dev", device))
    link = msgspec.json.decode(text, type=list[_Link])[0]
    if link.stats64 is None:
        raise LabUnavailable(f"`ip` shows no counters of {device} in {namespace}: install a newer iproute2")
    return link.stats64.rx.bytes, link.stats64.tx.bytes
