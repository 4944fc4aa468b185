from __future__ import annotations

import socket
from pathlib import Path

import pytest

from compose import ports
from compose.errors import StackRefused


def test_no_outgoing_connection_takes_a_free_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    local = tmp_path / "range"
    local.write_text("20000\t60999\n")
    monkeypatch.setattr(ports, "LOCAL_PORT_RANGE", local)
    drawn = {ports.free_port() for _ in range(20)}
    assert all(1024 < port < 20000 for port in drawn)
    assert len(drawn) > 10


@pytest.mark.parametrize("text", ["10000 65000", "1024 65000", "nonsense", ""])
def test_there_is_a_free_port_whatever_the_system_keeps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    local = tmp_path / "range"
    local.write_text(text)
    monkeypatch.setattr(ports, "LOCAL_PORT_RANGE", local)
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports.free_port()))
        server.listen()


def test_a_port_that_is_taken_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = ports.free_port()
        monkeypatch.setattr(ports, "candidates", lambda: [port, other])
        assert ports.free_port() == other


def test_the_next_free_ports_leave_out_those_that_are_taken() -> None:
    first = ports.free_port()
    with socket.socket() as taken:
        [next_one] = ports.next_free_ports("127.0.0.1", first, 1)
        taken.bind(("127.0.0.1", next_one))
        taken.listen()
        others = ports.next_free_ports("127.0.0.1", first, 2)
    assert len(set(others)) == 2
    assert next_one not in others
    assert min(others) > first
    with pytest.raises(StackRefused, match="no 2 free ports"):
        ports.next_free_ports("127.0.0.1", 65534, 2)
