"""λScale's transfers: from whom receivers get their blocks, and that they answer before any of them is whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest

from bench.sim.clock import Clock
from bench.sim.cluster import Cluster, known_cluster
from bench.sim.compute import Compute
from bench.sim.fabric import Fabric
from bench.sim.flows import Network
from bench.sim.instance import SimInstance
from bench.sim.lambdascale import LambdaPipe
from bench.sim.latencies import LOCAL_NATS
from bench.sim.loading import Load, Loads
from bench.sim.models import known_model
from services.worker.core.upstreams import part_of
from tests.bench.sim.instances import CONFIG, Asked, Heard
from tests.bench.sim.plans import plan_of
from tests.processes import process

MODEL = known_model("llama3-8b", "a100")
BYTES = MODEL.record.weights_bytes
APART = msgspec.structs.replace(
    known_cluster("b"), hosts=8, gpus_per_host=1, gpus_per_domain=1, nics_per_host=1, ssds_per_host=1,
    hosts_per_leaf=8, scale_up_gbps=None,
)  # fmt: skip
"""Whose GPUs reach each other over NICs alone."""


class Scaled:
    """A plan on its way. ``decoding``: places of GPUs with decode instances, which are whole; ``prefilling``: of those
    with prefill instances."""

    def __init__(
        self,
        cluster: Cluster,
        num_targets: int,
        *,
        decoding: Sequence[int] = (),
        prefilling: Sequence[int] = (),
        copies: Sequence[int] = (),
    ) -> None:
        self.clock = clock = Clock()
        self.fabric, self.network, self.heard = Fabric(cluster), Network(clock), Heard(clock)
        gpus = list(self.fabric.gpus)
        self.sources = [gpus[place] for place in (*decoding, *prefilling)]
        self.instances = {gpus[place]: self.instance(gpus[place], "decode") for place in decoding}
        self.instances |= {gpus[place]: self.instance(gpus[place], "prefill") for place in prefilling}
        self.plan, _ = plan_of(cluster, self.fabric, MODEL, (*decoding, *prefilling), num_targets, "host-cache", copies)
        self.early_s: dict[str, float] = {}
        self.whole_s: dict[str, float] = {}
        self.loads: dict[str, Load] = {}
        for target in self.plan.targets:
            part = part_of(self.plan, target.worker_id)
            assert part is not None

            def whole(worker_id: str = target.worker_id) -> None:
                self.whole_s[worker_id] = clock.now_s

            self.instances[target.worker_id] = self.instance(target.worker_id, "prefill")
            self.loads[target.worker_id] = Load(self.plan, part, MODEL.weights, target.worker_id, None, whole)
        loads = Loads(self.clock, self.network, self.fabric, lambda worker_id: worker_id)
        self.pipe = LambdaPipe(clock, self.network, self.fabric, LOCAL_NATS, MODEL, loads, lambda: self)
        self.pipe.start(self.loads, 1 << 20)

    def instance(self, worker_id: str, role: str) -> SimInstance:
        return SimInstance(
            self.clock,
            self.heard,
            instance_id=worker_id,
            worker=process(worker_id),
            model=MODEL.name,
            role=role,  # type: ignore[arg-type]
            config=CONFIG,
            compute=Compute(MODEL.profile),
        )

    def whole(self, model_hash: str) -> list[str]:
        assert model_hash == MODEL.record.model_hash
        return self.sources

    def instance_at(self, worker_id: str) -> SimInstance:
        return self.instances[worker_id]

    def serve_early(self, worker_id: str) -> None:
        self.early_s[worker_id] = self.clock.now_s
        self.instances[worker_id].serve()
        self.instances[worker_id].submit(Asked(worker_id, 512, 1))

    def seconds(self, gbps: float) -> float:
        return BYTES * 8 / 1e9 / gbps


def test_receivers_of_two_sources_answer_before_any_of_them_is_whole() -> None:
    scaled = Scaled(APART, 6, decoding=(0, 1))
    scaled.clock.run()
    assert set(scaled.whole_s) == set(scaled.loads)
    copy_s, steps = scaled.seconds(100.0), math.ceil(math.log2(3 + 1)) + 16 - 1
    assert max(scaled.whole_s.values()) == pytest.approx(steps / 16 * copy_s, rel=0.02)
    # Half of the blocks come from each: all are there after little more than half of the time.
    assert len(scaled.early_s) == 6
    assert min(scaled.early_s.values()) < 0.65 * copy_s
    assert max(scaled.early_s.values()) < min(scaled.whole_s.values())
    first_s = [times[0] for times in scaled.heard.times_s.values()]
    assert len(first_s) == 6
    assert min(first_s) < min(scaled.whole_s.values())


def test_without_copies_anywhere_each_reads_its_disk() -> None:
    scaled = Scaled(APART, 2)
    scaled.clock.run()
    assert list(scaled.whole_s.values()) == pytest.approx([scaled.seconds(10.0)] * 2)
    assert not scaled.early_s


def test_hosts_with_copies_are_read_from_each_at_its_own_link() -> None:
    scaled = Scaled(APART, 4, decoding=(0,), copies=(4, 5, 6, 7))
    scaled.clock.run()
    assert list(scaled.whole_s.values()) == pytest.approx([scaled.seconds(128.0)] * 4)
    # Each begins at another quarter.
    assert list(scaled.early_s.values()) == pytest.approx([scaled.seconds(128.0) / 4] * 4)


def test_a_copy_in_the_domain_is_faster_than_memory_for_one_receiver_and_not_for_many() -> None:
    cluster = known_cluster("b")
    one = Scaled(cluster, 1, decoding=(0,), copies=(0,))
    one.clock.run()
    assert list(one.whole_s.values()) == pytest.approx([one.seconds(256.0)])
    many = Scaled(cluster, 4, decoding=(0,), copies=(0,))
    many.clock.run()
    assert list(many.whole_s.values()) == pytest.approx([many.seconds(128.0)] * 4)


def test_a_link_that_kv_leaves_by_counts_half() -> None:
    slow = Scaled(known_cluster("b"), 1, prefilling=(0,), copies=(0,))
    slow.clock.run()
    assert list(slow.whole_s.values()) == pytest.approx([slow.seconds(128.0)])
    fast = Scaled(known_cluster("a"), 1, prefilling=(0,), decoding=(31,), copies=(0,))
    fast.clock.run()
    assert list(fast.whole_s.values()) == pytest.approx([fast.seconds(1600.0)])


def test_those_that_send_kv_are_sources_only_where_there_are_no_others() -> None:
    both = Scaled(APART, 2, decoding=(0,), prefilling=(1,))
    decode, prefill = both.sources
    assert (both.pipe.is_read(decode, ()), both.pipe.is_read(prefill, ())) == (True, False)
    both.clock.run()
    assert not both.pipe.is_read(decode, ())
    only = Scaled(APART, 2, prefilling=(1,))
    assert only.pipe.is_read(only.sources[0], ())
