"""Models in blocks: who receives from whom, in which order, and how long that takes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from bench.sim.blocks import Blocks, BlockSend, BlockTransfer, Group, from_host, groups_of, multicast
from bench.sim.clock import Clock
from bench.sim.flows import Network
from bench.sim.loading import Load, Weights
from bench.sim.models import known_model
from bench.sim.sharing import Resource
from services.worker.core.upstreams import part_of
from shared.messages.plans import Chain, ChainMember, Hop, ScalePlan, Stripe
from tests.processes import INCARNATION

GBPS, NUM_BYTES = 80.0, 16_000_000_000
WHOLE_S = NUM_BYTES * 8 / GBPS / 1e9
WEIGHTS = Weights.of(NUM_BYTES, 32, 1.0)
BLOCKS = Blocks.of(WEIGHTS)
MODEL = known_model("llama3-8b", "a100")


def test_blocks_are_even_and_have_all_layers_between_them() -> None:
    # A tenth are embeddings, and a tenth is the head.
    blocks = Blocks.of(Weights.of(1000, 10, 0.8), 4)
    assert blocks.num_bytes == 250
    assert blocks.layer_shares == pytest.approx((0.15 / 0.8, 0.25 / 0.8, 0.25 / 0.8, 0.15 / 0.8))
    assert Blocks.of(Weights.of(1000, 1, 0.5), 2).layer_shares == pytest.approx((0.5, 0.5))
    assert sum(Blocks.of(MODEL.weights).layer_shares) == pytest.approx(1.0)


def test_receivers_go_to_sources_of_their_domain_evenly_and_orders_are_shifted() -> None:
    def domain(worker_id: str) -> str:
        return worker_id[0]

    found = groups_of(["a1", "b1"], ["b2", "b3", "b4", "a2"], 16, domain)
    assert found == (Group("b1", ("b2", "b3"), 0), Group("a1", ("b4", "a2"), 8))
    assert groups_of(["a1", "a2", "b1"], ["a3"], 16, domain) == (Group("a1", ("a3",), 0),)
    assert groups_of([], [], 16, domain) == ()


class Ended:
    """Loads over one link out of each worker and one into it, and when each had each block."""

    def __init__(self, receivers: int) -> None:
        self.clock = Clock()
        self.network = Network(self.clock)
        self.names = tuple([f"r{i}" for i in range(receivers)])
        everyone = ("s", *self.names)
        self.out = {name: Resource(f"{name} out", GBPS) for name in everyone}
        self.memory = {name: Resource(f"memory of {name}", GBPS) for name in self.names}
        self.into = {name: Resource(f"{name} in", GBPS) for name in everyone}
        self.whole_s: dict[str, float] = {}
        self.blocks_s: dict[str, dict[int, float]] = {name: {} for name in self.names}
        self.loads = {name: self._load(name) for name in self.names}

    def _load(self, name: str) -> Load:
        hop = Hop(targets=(name,), stripes=(Stripe(source="", source_kind="disk", target=name),))
        plan = ScalePlan(
            plan_id="p",
            model=MODEL.record,
            role="prefill",
            members=(
                ChainMember(worker_id=name, incarnation=INCARNATION, instance_id="n", host="h", transport_address=b""),
            ),
            chains=(Chain(hops=(hop,), chunk_bytes=1),),
            triggered_at_s=0.0,
            valid_s=1.0,
            term=1,
        )
        part = part_of(plan, name)
        assert part is not None

        def whole() -> None:
            self.whole_s[name] = self.clock.now_s

        load = Load(plan, part, WEIGHTS, name, None, whole)
        load.started(len(BLOCKS))
        return load

    def on_block(self, load: Load, block: int) -> None:
        assert block not in self.blocks_s[load.worker_id]
        self.blocks_s[load.worker_id][block] = self.clock.now_s
        load.stripe_ended()

    def transfer(self, sends: list[BlockSend]) -> BlockTransfer:
        return BlockTransfer(
            self.network,
            sends,
            self.loads,
            BLOCKS,
            lambda send: (
                self.out[send.source] if send.source else self.memory[send.target],
                self.into[send.target],
            ),
            self.on_block,
        )


@pytest.mark.parametrize("receivers", [1, 2, 3, 6, 7, 12, 15, 16])
def test_a_multicast_takes_the_steps_of_its_schedule(receivers: int) -> None:
    ended = Ended(receivers)
    transfer = ended.transfer(multicast(Group("s", ended.names, 5), len(BLOCKS)))
    transfer.begin()
    assert transfer.sends("s")
    ended.clock.run()
    steps = math.ceil(math.log2(receivers + 1)) + len(BLOCKS) - 1
    assert set(ended.whole_s) == set(ended.names)
    assert max(ended.whole_s.values()) <= steps * WHOLE_S / len(BLOCKS) * (1 + 1e-9)
    assert max(ended.whole_s.values()) == pytest.approx(steps * WHOLE_S / len(BLOCKS), rel=1 / len(BLOCKS))
    assert transfer.over
    assert not transfer.sends("s")


def test_readers_of_their_hosts_memory_have_all_blocks_between_them_soon() -> None:
    ended = Ended(4)
    for number, name in enumerate(ended.names):
        ended.transfer(from_host(name, len(BLOCKS), first_block=4 * number)).begin()
    ended.clock.run()
    assert list(ended.whole_s.values()) == pytest.approx([WHOLE_S] * 4)
    first_s = [min(times[block] for times in ended.blocks_s.values()) for block in range(len(BLOCKS))]
    assert max(first_s) == pytest.approx(WHOLE_S / 4)
    for number, name in enumerate(ended.names):
        order = sorted(ended.blocks_s[name], key=ended.blocks_s[name].__getitem__)
        assert order[0] == 4 * number
        assert all((b - a) % len(BLOCKS) == 1 for a, b in pairwise(order))
