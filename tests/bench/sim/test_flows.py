"""Flows on a clock, against closed forms. A gigabit is 125 MB."""

from __future__ import annotations

import math

import pytest

from bench.sim.clock import Clock
from bench.sim.cluster import known_cluster
from bench.sim.fabric import Fabric
from bench.sim.flows import Flow, Network
from bench.sim.sharing import Resource
from shared.errors import BadRequest

GB = 1e9
"""Bytes: 8 s at a Gbit/s."""


class Bench:
    """A network whose flows' ends are noted."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.network = Network(self.clock)
        self.ended_s: dict[Flow, float] = {}

    def start(self, *path: Resource, num_bytes: float = GB, **rest: object) -> Flow:
        return self.network.start(path, num_bytes, on_end=self.note, **rest)  # type: ignore[arg-type]

    def note(self, flow: Flow) -> None:
        assert flow.state == "ended"
        assert flow.delivered_bytes == flow.num_bytes
        assert flow not in self.ended_s
        self.ended_s[flow] = self.clock.now_s

    def ends(self, *flows: Flow) -> list[float]:
        self.clock.run()
        return [self.ended_s[flow] for flow in flows]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def link() -> Resource:
    return Resource("link", 8.0)


def test_one_flow_takes_its_bytes_over_its_narrowest_link(bench: Bench, link: Resource) -> None:
    flow = bench.start(Resource("wide", 100.0), link)
    assert bench.network.rate_gbps(flow) == 8
    assert bench.ends(flow) == [1.0]


def test_two_share_a_link_until_the_shorter_one_ends(bench: Bench, link: Resource) -> None:
    long, short = bench.start(link, num_bytes=2 * GB), bench.start(link)
    assert bench.network.rate_gbps(long) == bench.network.rate_gbps(short) == 4
    assert bench.ends(long, short) == pytest.approx([3.0, 2.0])


def test_one_that_comes_later_slows_the_other_from_then_on(bench: Bench, link: Resource) -> None:
    first = bench.start(link)
    bench.clock.run(0.5)
    second = bench.start(link)
    assert bench.ends(first, second) == pytest.approx([1.5, 2.0])


def test_opposite_directions_do_not_disturb_each_other(bench: Bench) -> None:
    fabric = Fabric(known_cluster("lab"))
    there = bench.start(*fabric.gpu_to_gpu("host-0-gpu-0", "host-1-gpu-0"))
    back = bench.start(*fabric.gpu_to_gpu("host-1-gpu-0", "host-0-gpu-0"))
    assert bench.ends(there, back) == pytest.approx([32.0, 32.0])


def test_incast_shares_the_receiver_and_uplinks_share_the_leaf(bench: Bench) -> None:
    fabric = Fabric(known_cluster("large"))
    incast = [bench.start(*fabric.gpu_to_gpu(f"host-{h:03}-gpu-0", "host-000-gpu-0")) for h in (1, 2, 3, 4)]
    assert [bench.network.rate_gbps(flow) for flow in incast] == [25.0] * 4
    # All 128 NICs of a leaf send to another one: the uplinks have half of that.
    across = [
        bench.start(*fabric.gpu_to_gpu(f"host-{16 + h:03}-gpu-{g}", f"host-{32 + h:03}-gpu-{g}"))
        for h in range(16)
        for g in range(8)
    ]
    assert {bench.network.rate_gbps(flow) for flow in across} == {50.0}
    assert bench.network.used_gbps(fabric.uplinks["leaf-01"].out) == pytest.approx(6400.0)
    assert bench.network.used_gbps(fabric.uplinks["leaf-01"].into) == 0.0


def test_weights_and_caps(bench: Bench, link: Resource) -> None:
    heavy, light = bench.start(link, num_bytes=3 * GB, weight=3.0), bench.start(link)
    assert bench.ends(heavy, light) == pytest.approx([4.0, 4.0])
    flow = bench.start(link, cap_gbps=2.0)
    assert bench.ends(flow) == pytest.approx([8.0])


def test_a_cap_changes_on_the_way_and_can_halt(bench: Bench, link: Resource) -> None:
    flow, other = bench.start(link), bench.start(link, num_bytes=math.inf)
    bench.clock.run(1.0)
    bench.network.limit(flow, 0.0)
    assert bench.network.rate_gbps(other) == 8
    bench.clock.run(5.0)
    assert bench.network.delivered_bytes(flow) == pytest.approx(GB / 2)
    bench.network.limit(flow, 1.0)
    bench.clock.run(10.0)
    assert bench.ended_s == {flow: pytest.approx(9.0)}
    assert bench.network.delivered_bytes(other) == pytest.approx(10 * GB - GB)


def test_one_that_is_aborted_leaves_its_share_and_calls_nobody(bench: Bench, link: Resource) -> None:
    first, second = bench.start(link), bench.start(link)
    bench.clock.at(1.0, bench.network.abort, first)
    bench.clock.at(1.5, bench.network.abort, first)
    assert bench.ends(second) == pytest.approx([1.5])
    assert first.state == "aborted"
    assert bench.network.delivered_bytes(first) == pytest.approx(GB / 2)
    assert first not in bench.ended_s
    assert bench.network.rate_gbps(first) == 0


def test_marks_are_told_when_their_bytes_are_there_and_before_the_end(bench: Bench, link: Resource) -> None:
    told: list[tuple[float, float]] = []

    def tell(flow: Flow, mark: float) -> None:
        assert flow not in bench.ended_s
        told.append((mark, bench.clock.now_s))

    flow = bench.start(link, marks=[GB, GB / 4, GB / 2], on_mark=tell)
    bench.clock.at(0.25, bench.network.limit, flow, 4.0)
    bench.ends(flow)
    assert told == [(GB / 4, 0.25), (GB / 2, pytest.approx(0.75)), (GB, pytest.approx(1.75))]


def test_a_mark_may_abort_its_flow(bench: Bench, link: Resource) -> None:
    flow = bench.start(link, marks=[GB / 2, GB], on_mark=lambda flow, _: bench.network.abort(flow))
    bench.clock.run()
    assert flow.state == "aborted"
    assert flow.delivered_bytes == pytest.approx(GB / 2)
    assert bench.ended_s == {}
    assert bench.clock.now_s == 0.5


def test_the_end_of_one_starts_another_at_the_same_time(bench: Bench, link: Resource) -> None:
    started: list[Flow] = []
    bench.network.start((link,), GB, on_end=lambda _: started.append(bench.start(link)))
    bench.clock.run()
    assert bench.ended_s == {started[0]: 2.0}


def test_what_changes_in_one_instant_is_shared_out_once(bench: Bench, link: Resource) -> None:
    for _ in range(100):
        bench.start(link)
    bench.clock.run(0.0)
    assert bench.clock.num_happened == 1


@pytest.mark.parametrize(
    ("param", "rest"),
    [
        ("num_bytes", {"num_bytes": 0}),
        ("num_bytes", {"num_bytes": math.nan}),
        ("weight", {"weight": 0}),
        ("cap_gbps", {"cap_gbps": -1}),
        ("cap_gbps", {"cap_gbps": math.nan}),
        ("marks", {"marks": [0.0]}),
        ("marks", {"marks": [2 * GB]}),
    ],
)
def test_what_makes_no_transfer_is_refused_and_leaves_nothing(
    bench: Bench, link: Resource, param: str, rest: dict[str, object]
) -> None:
    with pytest.raises(BadRequest) as refused:
        bench.start(link, **rest)  # type: ignore[arg-type]
    assert refused.value.param == param
    assert bench.network.used_gbps(link) == 0
    assert len(bench.clock) == 0


def test_paths_are_checked_and_flows_that_ended_are_not_changed(bench: Bench, link: Resource) -> None:
    for path in ((), (link, link)):
        with pytest.raises(BadRequest) as refused:
            bench.start(*path)
        assert refused.value.param == "path"
    flow = bench.start(link)
    bench.clock.run()
    for change in (lambda: bench.network.limit(flow, 1.0), lambda: bench.network.reroute(flow, (link,))):
        with pytest.raises(BadRequest, match="runs no more"):
            change()
    bench.network.abort(flow)
    assert flow.state == "ended"
