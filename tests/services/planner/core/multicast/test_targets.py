from __future__ import annotations

import random
from collections.abc import Mapping, Set

import pytest

from services.planner.core.multicast.targets import TargetGroup, Targets
from services.planner.core.multicast.topology import Gpu, Nic, Topology, build_topology
from services.planner.core.multicast.traffic import LinkLoad
from shared.errors import BadTopology

SEEDS = range(30)


def some_topology(rng: random.Random) -> Topology:
    """Hosts of one or two scale-up domains, with NICs of several speeds, of which GPUs may share some."""
    gpus = []
    for h in range(rng.randint(1, 12)):
        num_domains, num_nics, gbps = rng.choice([1, 1, 2]), rng.choice([1, 2, 4]), rng.choice([100.0, 200.0])
        for g in range(4):
            nic = Nic(f"h{h}-n{g % num_nics}", f"leaf-{h % 3}", gbps)
            gpus.append(Gpu(f"h{h:02}-{g}", f"h{h}", f"h{h}-{g % num_domains}", nic, rng.choice([150.0, 1600.0])))
    return build_topology(gpus)


def some_load(rng: random.Random, topology: Topology) -> LinkLoad:
    busy = [nic for nic in topology.nics if rng.random() < 0.2]
    return LinkLoad(dict.fromkeys(busy[::2], 1), dict.fromkeys(busy[1:], 1))


def sorted_at_once(
    targets: list[TargetGroup],
    leaf_order: Mapping[str, int],
    source_domains: Mapping[str, float],
    source_hosts: Set[str],
) -> list[TargetGroup]:
    """The order in one sentence."""

    def key(group: TargetGroup) -> tuple[object, ...]:
        rank, egress = 1, 0.0
        if group.domain in source_domains:
            rank, egress = 0, source_domains[group.domain]
        elif group.disturbs:
            rank = 3
        elif group.egress_gbps < group.ingress_gbps:
            rank, egress = 2, -group.egress_gbps
        position = leaf_order.get(group.leaf, len(leaf_order))
        leaf = "" if group.leaf in leaf_order else group.leaf
        host_gbps = max(other.ingress_gbps for other in targets if other.host == group.host)
        far = group.host not in source_hosts
        return rank, egress, position, far, leaf, -host_gbps, group.host, -group.ingress_gbps, group.gpus[0].gpu_id

    return sorted(targets, key=key)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_is_that_of_all_groups_sorted_at_once_whatever_was_taken_before(seed: int) -> None:
    rng = random.Random(seed)
    topology = some_topology(rng)
    load, left = some_load(rng, topology), list(topology.gpus)
    targets = Targets(topology, left, load)
    while left:
        fresh = Targets(topology, left, load)
        assert (len(targets), targets.num_gpus, targets.width) == (len(fresh), len(left), fresh.width)
        assert [gpu_id for gpu_id in topology.gpus if gpu_id in targets] == sorted(left)
        leaves = rng.sample(["leaf-0", "leaf-1", "leaf-2"], rng.randint(0, 3))
        hosts = frozenset(rng.sample(sorted(topology.hosts), rng.randint(0, len(topology.hosts))))
        domains = [gpu.domain for gpu in topology.gpus.values() if gpu.gpu_id in left and rng.random() < 0.2]
        near = {leaf: i for i, leaf in enumerate(leaves)}, {d: rng.choice([0.0, 0.1, 0.3]) for d in domains}, hosts
        groups = [group for d in topology.scale_up_gbps if (group := targets.group_of(d)) is not None]
        assert list(targets.in_order(*near)) == sorted_at_once(groups, *near) == list(fresh.in_order(*near))
        taken = rng.sample(left, min(len(left), rng.choice([1, 2, 5])))
        left = [gpu_id for gpu_id in left if gpu_id not in taken]
        targets.take(taken)
    assert (len(targets), targets.num_gpus, targets.width) == (0, 0, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_targets_without_some_are_others_that_change_apart(seed: int) -> None:
    rng = random.Random(seed)
    topology = some_topology(rng)
    load, ids = some_load(rng, topology), list(topology.gpus)
    targets, avoided = Targets(topology, ids, load), rng.sample(ids, len(ids) // 3)
    others = targets.without(avoided)
    assert in_order(others) == in_order(Targets(topology, [i for i in ids if i not in avoided], load))
    assert in_order(targets) == in_order(Targets(topology, ids, load))
    half = ids[::2]
    targets.take(half)
    others.take([i for i in ids[1::2] if i not in avoided])
    assert in_order(targets) == in_order(Targets(topology, ids[1::2], load))
    assert in_order(others) == in_order(Targets(topology, [i for i in half if i not in avoided], load))


def in_order(targets: Targets) -> list[TargetGroup]:
    return list(targets.in_order({}, {}, frozenset()))


def test_unknown_and_repeated_targets_are_refused() -> None:
    topology = some_topology(random.Random(0))
    for ids in (["nobody"], ["h00-0", "h00-0"]):
        with pytest.raises(BadTopology):
            Targets(topology, ids, LinkLoad({}, {}))
