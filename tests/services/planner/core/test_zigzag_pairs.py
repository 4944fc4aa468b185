"""Who scales live with whom."""

from __future__ import annotations

from services.planner.core.flows import Source
from services.planner.core.multicast import Multicast, plan
from services.planner.core.topology import Gpu, Host, Nic, build_topology
from services.planner.core.zigzag_pairs import Overloaded, select_pairs


def two_chains() -> Multicast:
    """From sources a and b to c and d; d's NIC is slower, so it finishes last."""
    gpus, hosts = [], []
    for name, gbps in (("a", 100.0), ("b", 100.0), ("c", 100.0), ("d", 25.0)):
        nic = Nic(f"{name}-nic", "leaf", gbps)
        gpus.append(Gpu(name, name, name, nic, 3600.0))
        hosts.append(Host(name, nic))
    return plan(build_topology(gpus, hosts), [Source("a"), Source("b")], ["c", "d"], 2, [], 10**9, tails=2)


def test_the_slowest_tail_goes_to_the_longest_queue() -> None:
    made = two_chains()
    assert sorted(made.tails) == ["c", "d"]
    selection = select_pairs([Overloaded("x", 2.0, 0.01), Overloaded("y", 3.0, 0.01)], made)
    assert [(pair.source, pair.target) for pair in selection.pairs] == [("y", "d"), ("x", "c")]
    assert "d is a tail" in selection.pairs[0].why
    assert selection.declined == ()


def test_only_a_tail_that_would_be_late_goes_live() -> None:
    made = two_chains()
    slack_s = (made.finish_s["c"] + made.finish_s["d"]) / 2
    selection = select_pairs([Overloaded("x", 9.0, slack_s), Overloaded("y", 8.0, slack_s)], made)
    assert [(pair.source, pair.target) for pair in selection.pairs] == [("x", "d")]
    assert "stop-the-world meets the SLO" in selection.declined[0]
    with_margin = select_pairs([Overloaded("y", 8.0, slack_s)], made, tails=["c"], margin_s=slack_s)
    assert [pair.target for pair in with_margin.pairs] == ["c"]


def test_an_instance_that_is_not_overloaded_needs_no_partner() -> None:
    selection = select_pairs([Overloaded("x", 0.5, 0.6)], two_chains())
    assert selection.pairs == ()
    assert "not overloaded" in selection.declined[0]


def test_an_instance_is_in_one_pair_and_a_tail_too() -> None:
    sources = [Overloaded("x", 3.0, 0.0, live=True), Overloaded("y", 2.0, 0.0), Overloaded("z", 1.0, 0.0)]
    selection = select_pairs(sources, two_chains(), tails=["c"])
    assert [(pair.source, pair.target) for pair in selection.pairs] == [("y", "c")]
    assert [reason.split(":")[0] for reason in selection.declined] == ["x", "z"]
