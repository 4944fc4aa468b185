"""Flows that forward others: chains, stripes, and what becomes of them when a hop is lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sim.flows import BYTES_PER_GBIT, Flow
from bench.sim.sharing import Resource
from shared.errors import BadRequest
from tests.bench.sim.fairness import chunk_by_chunk_s
from tests.bench.sim.test_flows import GB, Bench

CHUNK = GB / 100


@pytest.fixture
def bench() -> Bench:
    return Bench()


def links(*gbps: float) -> list[Resource]:
    return [Resource(f"link {i}", each) for i, each in enumerate(gbps)]


def chain(bench: Bench, hops: list[Resource], num_bytes: float = GB, chunk_bytes: float = CHUNK) -> list[Flow]:
    flows: list[Flow] = []
    for hop in hops:
        flows.append(bench.start(hop, num_bytes=num_bytes, upstreams=flows[-1:], chunk_bytes=chunk_bytes))
    return flows


@pytest.mark.parametrize("num_hops", [1, 2, 7, 31])
def test_a_chain_takes_the_model_once_and_a_chunk_per_further_hop(bench: Bench, num_hops: int) -> None:
    ends = bench.ends(*chain(bench, links(*[8.0] * num_hops)))
    assert ends == pytest.approx([1.0 + hop * 0.01 for hop in range(num_hops)], rel=1e-9)


def test_a_star_takes_the_model_once_per_target(bench: Bench) -> None:
    out, *ins = links(8.0, *[8.0] * 7)
    assert bench.ends(*[bench.start(out, each) for each in ins]) == pytest.approx([7.0] * 7)


def test_a_chain_is_as_fast_as_its_slowest_hop(bench: Bench) -> None:
    ends = bench.ends(*chain(bench, links(8.0, 2.0, 8.0)))
    assert ends == pytest.approx([1.0, 0.01 + 4.0, 0.01 + 4.0 + 0.01])


def test_what_a_hop_leaves_of_its_link_is_anothers(bench: Bench) -> None:
    slow, fast = links(2.0, 8.0)
    first, second = chain(bench, [slow, fast])
    other = bench.start(fast, num_bytes=math.inf)
    bench.clock.run(1.0)
    assert [bench.network.rate_gbps(flow) for flow in (first, second, other)] == pytest.approx([2, 2, 6])


def test_the_first_chunk_must_be_whole(bench: Bench) -> None:
    _, second = chain(bench, links(8.0, 8.0), chunk_bytes=GB / 10)
    bench.clock.run(0.0999)
    assert bench.network.delivered_bytes(second) == 0
    bench.clock.run(0.15)
    assert bench.network.delivered_bytes(second) == pytest.approx(GB / 20)


def test_less_than_a_chunk_is_sent_on_once_it_is_whole(bench: Bench) -> None:
    assert bench.ends(*chain(bench, links(8.0, 4.0), chunk_bytes=2 * GB)) == pytest.approx([1.0, 3.0])


def test_one_that_comes_later_catches_up(bench: Bench) -> None:
    slow, fast = links(2.0, 8.0)
    first = bench.start(slow)
    bench.clock.run(2.0)
    second = bench.start(fast, upstreams=[first], chunk_bytes=CHUNK)
    # It has 0.49 GB to send at 8 Gbit/s while 2 Gbit/s come in.
    bench.clock.run(2.65)
    assert bench.network.rate_gbps(second) == 8
    bench.clock.run(2.66)
    assert bench.network.rate_gbps(second) == pytest.approx(2)
    assert bench.ends(first, second) == pytest.approx([4.0, 4.01])


def test_one_that_is_slowed_falls_behind_and_catches_up_again(bench: Bench) -> None:
    first, second = chain(bench, links(4.0, 8.0))
    bench.clock.run(0.5)
    bench.network.limit(second, 1.0)
    bench.clock.run(1.0)
    assert bench.network.delivered_bytes(second) == pytest.approx(GB / 4 - CHUNK + GB / 16)
    bench.network.limit(second, 8.0)
    assert bench.network.rate_gbps(second) == 8
    assert bench.ends(first, second) == pytest.approx([2.0, 2.01])


def test_stripes_are_forwarded_as_they_come_together(bench: Bench) -> None:
    one, other, out = links(4.0, 2.0, 8.0)
    stripes = [bench.start(one, num_bytes=GB / 2), bench.start(other, num_bytes=GB / 2)]
    whole = bench.start(out, upstreams=stripes, chunk_bytes=CHUNK)
    bench.clock.run(0.5)
    # As fast as the slower half lets it.
    assert bench.network.rate_gbps(whole) == pytest.approx(4.0)
    assert bench.ends(*stripes, whole) == pytest.approx([1.0, 2.0, 2.01])


def test_a_lost_hop_stops_those_behind_it_until_they_are_rerouted(bench: Bench) -> None:
    spare, *hops = links(8.0, 8.0, 8.0, 8.0)
    first, second, third = chain(bench, hops)
    bench.clock.run(0.5)
    bench.network.abort(first)
    bench.clock.run(5.0)
    has = bench.network.delivered_bytes(second)
    assert has == pytest.approx(GB / 2 - CHUNK)
    assert bench.network.delivered_bytes(third) == pytest.approx(has - CHUNK)
    assert [bench.network.rate_gbps(flow) for flow in (second, third)] == [0, 0]
    bench.network.reroute(second, [spare])
    rest_s = (GB - has) / GB
    assert bench.ends(second, third) == pytest.approx([5 + rest_s, 5 + rest_s + 0.01])


def test_a_chain_may_be_joined_to_another_but_not_to_itself(bench: Bench) -> None:
    hops = links(8.0, 8.0, 8.0, 8.0)
    first, second, third = chain(bench, hops[:3])
    late = bench.start(hops[3], cap_gbps=4.0)
    for upstreams in ([third], [first, second], [first]):
        with pytest.raises(BadRequest, match="forward itself"):
            bench.network.reroute(first, hops[:1], upstreams)
    # A later flow as upstream of an earlier one.
    bench.clock.run(0.5)
    with pytest.raises(BadRequest, match="has chunks"):
        bench.network.reroute(late, hops[3:], [first])
    bench.network.reroute(second, hops[1:2], [late])
    assert [flow.hop for flow in (late, second, third)] == [1, 2, 3]
    assert bench.ends(late, second, third) == pytest.approx([2.0, 2.01, 2.02])


def test_what_forwards_has_chunks_and_an_end(bench: Bench) -> None:
    hop, other = links(8.0, 8.0)
    endless, first = bench.start(hop, num_bytes=math.inf), bench.start(hop)
    for upstream, chunk_bytes, param in ((first, 0, "chunk_bytes"), (endless, CHUNK, "num_bytes")):
        with pytest.raises(BadRequest) as refused:
            bench.start(other, upstreams=[upstream], chunk_bytes=chunk_bytes)
        assert refused.value.param == param


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 8.0]), min_size=1, max_size=6), st.integers(1, 40))
def test_never_earlier_than_chunk_by_chunk_and_hardly_later(gbps: list[float], num_chunks: int) -> None:
    bench = Bench()
    flows = chain(bench, links(*gbps), num_bytes=num_chunks * CHUNK)
    for hop, end_s in enumerate(bench.ends(*flows)):
        passed = [each * BYTES_PER_GBIT for each in gbps[: hop + 1]]
        exact_s = chunk_by_chunk_s(num_chunks, CHUNK, passed)
        chunk_s = CHUNK / min(passed)
        assert exact_s - 1e-3 * chunk_s <= end_s <= exact_s + (hop + 1e-3) * chunk_s
        if gbps[: hop + 1] == sorted(gbps[: hop + 1], reverse=True):
            assert end_s == pytest.approx(exact_s)
