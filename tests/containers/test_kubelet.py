"""The test cluster itself: it does what the YAML says, or refuses it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from tests.compose.kubernetes.manifests import OVERLAYS, load, pods
from tests.containers.kubelet.fields import UnknownField
from tests.containers.kubelet.names import NameServer
from tests.containers.kubelet.pod_spec import pod_spec
from tests.containers.kubelet.probes import Probe, Target, verdicts
from tests.containers.kubelet.volumes import Projected, write_projected


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_field_of_the_yaml_is_known(overlay: str) -> None:
    for each in pods(load(overlay)):
        assert pod_spec(each.spec).memory_bytes > 0


@pytest.mark.parametrize(
    ("where", "field", "value"),
    [
        ("spec", "hostNetwork", True),
        ("spec", "enableServiceLinks", True),
        ("container", "workingDir", "/"),
        ("container", "args", ["$(HOME)"]),
        ("probe", "successThreshold", 2),
        ("rights", "privileged", True),
    ],
)
def test_what_is_not_known_is_refused(where: str, field: str, value: Any) -> None:
    (spec,) = (each.spec for each in pods(load("one-node")) if each.workload == "pool")
    (container,) = spec["containers"]
    parts = {
        "spec": spec,
        "container": container,
        "probe": container["livenessProbe"],
        "rights": container["securityContext"],
    }
    parts[where][field] = value
    with pytest.raises(UnknownField):
        pod_spec(spec)


def test_files_of_a_secret_change_together(tmp_path: Path) -> None:
    volume = Projected("secret", "pool", 0o440)
    write_projected(tmp_path, volume, {"user": b"a", "password": b"1", "old": b""}, 10001)
    first = (tmp_path / "user").resolve().parent
    assert (tmp_path / "user").readlink() == Path("..data/user")
    assert (tmp_path / "user").stat().st_mode & 0o777 == 0o440
    assert (tmp_path / "user").stat().st_gid == 10001
    write_projected(tmp_path, volume, {"user": b"b", "password": b"2"}, 10001)
    second = {(tmp_path / name).resolve().parent for name in ("user", "password")}
    assert len(second) == 1
    assert first not in second
    assert (tmp_path / "password").read_bytes() == b"2"
    assert not (tmp_path / "old").is_symlink()
    assert not first.exists()


class _Sent:
    """Where a name server's answers go."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []

    def sendto(self, data: bytes, address: object) -> None:
        self.answers.append(data)


@pytest.mark.parametrize(
    ("name", "kind", "flags", "num_answers"), [("pool", 1, 0x8580, 2), ("pool", 28, 0x8580, 0), ("x", 1, 0x8583, 0)]
)
def test_names_are_answered(name: str, kind: int, flags: int, num_answers: int) -> None:
    server = NameServer({"pool": ["10.77.1.1", "10.77.1.2"]}.get)
    sent: Any = _Sent()
    server.connection_made(sent)
    labels = bytes([len(name)]) + name.encode() + b"\0"
    question = struct.pack("!HHHHHH", 7, 0x0100, 1, 0, 0, 0) + labels + struct.pack("!HH", kind, 1)
    server.datagram_received(question, ("127.0.0.1", 53))
    (answer,) = sent.answers
    assert struct.unpack_from("!HHHH", answer) == (7, flags, 1, num_answers)


async def test_a_probe_counts_failures_in_a_row() -> None:
    codes = iter([1, 0, 1, 1, 1, 0])

    async def execute(command: list[str]) -> tuple[int, str]:
        return next(codes), "why"

    probe = Probe(["true"], None, 0, period_s=0.0, timeout_s=9.0, failures=2, delay_s=0.0)
    found = []
    async for why in verdicts(probe, Target("", {}, execute)):
        found.append(not why)
        if len(found) == 4:
            break
    assert found == [True, False, False, True]
