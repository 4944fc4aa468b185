from __future__ import annotations

import msgspec
import pytest

from services.planner.core.multicast.chains import MAX_FALLBACKS, WorkerChains, gbps_of, plan_worker_chains
from services.planner.core.multicast.timing import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, chunk_bytes
from shared.messages.common import Role
from shared.messages.plans import Chain, Copy, Hop, Stripe
from shared.messages.registry import WorkerRecord
from tests.services.planner.core.multicast.clusters import MODEL_BYTES, cluster, paths, record


def test_a_chain_runs_from_the_source_through_all_targets() -> None:
    plan = plan_worker_chains(cluster(record("w0", "serving"), record("w2"), record("w1")), 2, MODEL_BYTES)
    assert paths(plan.chains) == [[("gpu", "w0", "w1"), ("gpu", "w1", "w2")]]
    assert [hop.targets for hop in plan.chains[0].hops] == [("w1",), ("w2",)]
    assert all(s.share == 1 and s.cap_gbps == 0 for hop in plan.chains[0].hops for s in hop.stripes)
    assert plan.links == (("w0", "w1"), ("w1", "w2"))
    assert not plan.left_out


def test_each_hop_has_the_finish_that_is_predicted_for_it() -> None:
    plan = plan_worker_chains(cluster(record("w0", "serving"), record("w1"), record("w2")), 2, MODEL_BYTES)
    first, second = (hop.predicted_finish_s for hop in plan.chains[0].hops)
    assert first == pytest.approx(MODEL_BYTES * 8e-10)
    assert first < second < 1.03 * first
    assert plan.predicted_s == {"w1": first, "w2": second}


def test_targets_on_the_sources_host_come_first_then_host_by_host() -> None:
    spare = [record("w1", host="b"), record("w2", host="c"), record("w3", host="b"), record("w4", host="a")]
    found = cluster(record("w0", "serving", host="a"), *spare)
    plan = plan_worker_chains(found, 4, MODEL_BYTES)
    assert [found.workers[t].host for t in plan.targets] == ["a", "b", "b", "c"]


def test_workers_of_one_host_without_a_domain_forward_to_each_other_over_its_memory() -> None:
    plan = plan_worker_chains(cluster(*_on_host("serving", "spare", "spare")), 2, MODEL_BYTES)
    assert paths(plan.chains) == [[("gpu", "w0", "w1"), ("gpu", "w1", "w2")]]
    assert "own host" in plan.explain[1]


def _on_host(*states: str) -> list[WorkerRecord]:
    return [record(f"w{i}", state, host="a") for i, state in enumerate(states)]  # type: ignore[arg-type]


# --- scale-up groups -------------------------------------------------------------------------------


def gpu(host: str, index: int, state: str = "spare", **changes: object) -> WorkerRecord:
    """A GPU with a NIC of its own, joined to the host's others by NVLink."""
    fields = {"host": host, "scale_up_domain": f"nvlink of {host}", "nic": f"nic-{index}", "nic_gbps": 100.0}
    return record(f"{host}-{index}", state, device="cuda", **(fields | changes))  # type: ignore[arg-type]


def test_a_group_receives_stripes_in_parallel_and_shares_them_out() -> None:
    sources = [gpu("a", i, "serving") for i in range(2)]
    plan = plan_worker_chains(cluster(*sources, gpu("b", 0), gpu("b", 1)), 2, MODEL_BYTES)
    (hop,) = plan.chains[0].hops
    assert hop.targets == ("b-0", "b-1")
    assert [(s.source, s.target, s.share) for s in hop.stripes] == [("a-0", "b-0", 0.5), ("a-1", "b-1", 0.5)]
    assert hop.predicted_finish_s == pytest.approx(MODEL_BYTES * 8e-9 / 200, rel=0.02)
    assert any("striped" in line and "a-0 -> b-0 50 %" in line for line in plan.explain)


def test_the_shares_of_a_hop_are_all_of_the_model() -> None:
    widths = (100.0, 30.0, 25.0)
    sources = [gpu("a", i, "serving", nic_gbps=gbps) for i, gbps in enumerate(widths)]
    plan = plan_worker_chains(cluster(*sources, *(gpu("b", i, nic_gbps=70.0) for i in range(3))), 3, MODEL_BYTES)
    (hop,) = plan.chains[0].hops
    assert len(hop.stripes) > 3
    assert sum(s.share for s in hop.stripes) == pytest.approx(1.0, abs=1e-9)


def test_a_group_forwards_to_the_next_group_stripe_by_stripe() -> None:
    groups = [gpu(host, i) for host in "bc" for i in range(2)]
    plan = plan_worker_chains(cluster(gpu("a", 0, "serving"), gpu("a", 1, "serving"), *groups), 4, MODEL_BYTES)
    (chain,) = plan.chains
    assert [(s.source, s.target) for s in chain.hops[1].stripes] == [("b-0", "c-0"), ("b-1", "c-1")]


def test_a_group_that_ends_a_chain_is_all_tails() -> None:
    groups = [gpu(host, i) for host in "bc" for i in range(2)]
    plan = plan_worker_chains(cluster(gpu("a", 0, "serving"), gpu("a", 1, "serving"), *groups), 4, MODEL_BYTES)
    assert plan.tails == ("c-0", "c-1")


def test_the_end_of_a_chain_that_feeds_another_chain_is_no_tail() -> None:
    def hop(source: str, target: str) -> Hop:
        return Hop(targets=(target,), stripes=(Stripe(source=source, source_kind="gpu", target=target),))

    chains = (Chain(hops=(hop("a", "b"),), chunk_bytes=1), Chain(hops=(hop("b", "c"), hop("c", "d")), chunk_bytes=1))
    assert WorkerChains(chains, (), ()).tails == ("d",)
    # A target that reads its own host's memory feeds nobody else.
    assert WorkerChains((Chain(hops=(hop("e", "e"),), chunk_bytes=1),), (), ()).tails == ("e",)


def test_a_spare_worker_of_the_copys_own_domain_uses_no_nic() -> None:
    plan = plan_worker_chains(cluster(gpu("a", 0, "serving"), gpu("a", 1)), 1, MODEL_BYTES)
    assert paths(plan.chains) == [[("gpu", "a-0", "a-1")]]
    assert "scale-up domain" in plan.explain[0]


# --- what is in flight -----------------------------------------------------------------------------


def test_a_source_that_already_sends_is_avoided() -> None:
    found = cluster(record("w0", "serving"), record("w1", "serving"), record("w2"), record("w9"), links=(("w0", "w9"),))
    assert plan_worker_chains(found, 1, MODEL_BYTES).links == (("w1", "w2"),)


def test_a_source_that_sends_inside_its_host_is_avoided_too() -> None:
    workers = _on_host("serving", "serving", "spare", "loading")
    found = cluster(*workers, links=(("w0", "w3"),))
    plan = plan_worker_chains(found, 1, MODEL_BYTES)
    assert plan.links == (("w1", "w2"),)
    assert "inside their host, read only after the others: w0" in plan.explain[0]


def test_a_planner_that_does_not_know_flows_takes_the_busy_source() -> None:
    workers = (record("w0", "serving", egress_gbps=9.0), record("w1", "serving"), record("w2"))
    assert plan_worker_chains(cluster(*workers), 1, MODEL_BYTES).links == (("w1", "w2"),)
    assert plan_worker_chains(cluster(*workers, knows_flows=False), 1, MODEL_BYTES).links == (("w0", "w2"),)


def test_a_sending_source_serves_when_nothing_is_left_and_the_plan_says_so() -> None:
    found = cluster(record("w0", "serving"), record("w2"), record("w9"), links=(("w0", "w9"),))
    plan = plan_worker_chains(found, 1, MODEL_BYTES)
    assert plan.links[0][0] == "w0"
    assert "in use" in " ".join(plan.explain)


def test_a_source_that_ships_kv_out_is_avoided() -> None:
    found = cluster(record("w0", "serving", egress_gbps=5.0), record("w1", "serving", ingress_gbps=5.0), record("w2"))
    assert plan_worker_chains(found, 1, MODEL_BYTES).links == (("w1", "w2"),)


def test_a_transfer_that_shares_a_nic_with_serving_leaves_serving_its_share() -> None:
    plan = plan_worker_chains(cluster(record("w0", "serving", egress_gbps=5.0), record("w1")), 1, MODEL_BYTES)
    (stripe,) = plan.chains[0].hops[0].stripes
    assert stripe.cap_gbps == pytest.approx(5.0)
    into = plan_worker_chains(cluster(record("w0", "serving"), record("w1", ingress_gbps=5.0)), 1, MODEL_BYTES)
    assert into.chains[0].hops[0].stripes[0].cap_gbps == pytest.approx(5.0)


def test_a_transfer_that_shares_a_nic_with_another_transfer_is_not_held_back() -> None:
    found = cluster(record("w0", "serving"), record("w1"), record("w9", "loading"), links=(("w0", "w9"),))
    (stripe,) = plan_worker_chains(found, 1, MODEL_BYTES).chains[0].hops[0].stripes
    assert (stripe.source, stripe.cap_gbps) == ("w0", 0.0)


def test_a_target_that_still_loads_feeds_the_next_plan_when_every_whole_copy_sends() -> None:
    workers = (record("w0", "serving"), record("w1", "loading"), record("w2"))
    plan = plan_worker_chains(cluster(*workers, links=(("w0", "w1"),), remaining_s={"w1": 2.0}), 1, MODEL_BYTES)
    assert plan.links == (("w1", "w2"),)
    assert plan.chains[0].hops[0].predicted_finish_s > 2.0
    assert "still load" in " ".join(plan.explain)
    assert plan.fallbacks == (Copy(worker_id="w0", kind="gpu"),), "what still loads is no fallback"


@pytest.mark.parametrize("host", ["h-w1", "h-w2"])
def test_a_whole_copy_that_does_not_send_comes_before_one_that_loads(host: str) -> None:
    workers = (record("w0", "serving"), record("w1", "loading"), record("w2", host=host), record("w3", "serving"))
    found = cluster(*workers, links=(("w0", "w1"),), remaining_s={"w1": 2.0})
    assert plan_worker_chains(found, 1, MODEL_BYTES).links == (("w3", "w2"),)


def test_a_chain_inside_a_host_is_continued_by_the_copy_that_loads_at_its_end() -> None:
    found = cluster(
        *_on_host("serving", "loading", "loading", "spare"),
        links=(("w0", "w1"), ("w1", "w2")),
        remaining_s={"w1": 1.0, "w2": 1.1},
    )
    assert plan_worker_chains(found, 1, MODEL_BYTES).links == (("w2", "w3"),)


# --- chains that go on inside a domain ---------------------------------------------------------------


def test_a_plan_beside_another_one_continues_its_chain_although_whole_copies_elsewhere_are_idle() -> None:
    spare = [gpu("a", i) for i in range(2, 4)]
    whole = (gpu("a", 0, "serving"), gpu("b", 0, "serving"))
    found = cluster(*whole, gpu("a", 1, "loading"), *spare, links=(("a-0", "a-1"),), remaining_s={"a-1": 5e-4})
    plan = plan_worker_chains(found, 1, MODEL_BYTES)
    assert plan.links == (("a-1", "a-2"),)
    assert plan.predicted_s["a-2"] == pytest.approx(MODEL_BYTES * 8e-9 / 1600, rel=0.1)
    assert plan.tails == ("a-2",)
    assert "continues chains" in plan.explain[1]
    assert Copy(worker_id="a-1", kind="gpu") not in plan.fallbacks, "what still loads is no fallback"


def test_an_idle_copy_of_the_domain_comes_before_one_that_loads() -> None:
    workers = (gpu("a", 0, "serving"), gpu("a", 1, "loading"), gpu("a", 2, "serving"), gpu("a", 3))
    found = cluster(*workers, links=(("a-0", "a-1"),), remaining_s={"a-1": 0.1})
    assert plan_worker_chains(found, 1, MODEL_BYTES).links == (("a-2", "a-3"),)


def test_a_copy_that_loads_slowly_is_left_for_the_network() -> None:
    workers = (gpu("a", 0, "loading"), gpu("a", 1), gpu("b", 0, "serving"))
    slowly = cluster(*workers, remaining_s={"a-0": 9.0})
    assert plan_worker_chains(slowly, 1, MODEL_BYTES).links == (("b-0", "a-1"),)
    soon = cluster(*workers, remaining_s={"a-0": 0.001})
    assert plan_worker_chains(soon, 1, MODEL_BYTES).links == (("a-0", "a-1"),)


def test_targets_beside_an_idle_copy_come_before_those_that_wait_for_one_that_loads() -> None:
    workers = (gpu("a", 0, "loading"), gpu("a", 1), gpu("b", 0, "serving"), gpu("b", 1), gpu("c", 0, "serving"))
    found = cluster(*workers, links=(("c-0", "a-0"),), remaining_s={"a-0": 0.005})
    assert plan_worker_chains(found, 1, MODEL_BYTES).links == (("b-0", "b-1"),)


def test_what_gpus_send_each_other_is_known_with_the_all_gathers_of_hops() -> None:
    sources = [gpu("a", i, "serving") for i in range(2)]
    plan = plan_worker_chains(cluster(*sources, *(gpu("b", i) for i in range(2))), 2, MODEL_BYTES)
    half = pytest.approx(100.0, rel=0.01)
    assert gbps_of(plan.chains, MODEL_BYTES) == {
        ("a-0", "b-0"): half,
        ("a-1", "b-1"): half,
        ("b-0", "b-1"): half,
        ("b-1", "b-0"): half,
    }


def test_a_chain_over_host_memory_goes_on_where_whole_copies_elsewhere_are_idle() -> None:
    found = cluster(
        *_on_host("serving", "loading", "spare"),
        record("x", "serving"),
        links=(("w0", "w1"),),
        remaining_s={"w1": 0.01},
    )
    assert plan_worker_chains(found, 1, MODEL_BYTES).links == (("w1", "w2"),)


# --- copies ----------------------------------------------------------------------------------------


def test_a_draining_source_is_the_last_choice() -> None:
    found = cluster(record("w0", "draining"), record("w1", "serving"), record("w2"))
    assert plan_worker_chains(found, 1, MODEL_BYTES).links == (("w1", "w2"),)


def test_a_host_copy_is_a_source_and_is_named_by_its_first_holder() -> None:
    found = cluster(
        record("w1", "spare", host="a", host_copy="ready", arena_bytes=0),
        record("w0", "spare", host="a", host_copy="ready", arena_bytes=0),
        record("w2"),
        record("w3"),
    )
    plan = plan_worker_chains(found, 2, MODEL_BYTES)
    assert paths(plan.chains) == [[("host", "w0", "w2"), ("gpu", "w2", "w3")]]
    assert "a's host copy" in " ".join(plan.explain)


def test_a_gpu_copy_comes_before_a_host_copy() -> None:
    found = cluster(record("w0", host_copy="ready", arena_bytes=0), record("w1", "serving"), record("w2"))
    assert paths(plan_worker_chains(found, 1, MODEL_BYTES).chains) == [[("gpu", "w1", "w2")]]


def test_a_target_that_holds_a_host_copy_itself_reads_its_own_memory() -> None:
    plan = plan_worker_chains(
        cluster(
            record("w1", host="b", host_copy="ready", arena_bytes=0),
            record("w2", host="b", host_copy="ready"),
        ),
        1,
        MODEL_BYTES,
    )
    assert paths(plan.chains) == [[("host", "w2", "w2")]]
    assert plan.links == (), "nobody sends"


def test_without_any_copy_the_first_target_reads_its_disk() -> None:
    plan = plan_worker_chains(cluster(record("w1"), record("w2")), 2, MODEL_BYTES)
    assert paths(plan.chains) == [[("disk", "", "w1"), ("gpu", "w1", "w2")]]
    assert plan.fallbacks == ()


def test_copies_outside_the_plan_come_first_as_fallbacks_then_its_sources_then_host_copies() -> None:
    found = cluster(
        record("w0", "serving"),
        record("w1", "draining", leaf="leaf-1"),
        record("w2", "serving", leaf="leaf-1"),
        record("w3", host_copy="ready", arena_bytes=0),
        record("w4", "serving", leaf="leaf-1", host_copy="ready"),
        record("w5"),
        record("w9", "loading"),
        links=(("w2", "w9"),),
    )
    plan = plan_worker_chains(found, 1, MODEL_BYTES)
    assert plan.links == (("w0", "w5"),)
    assert [(c.kind, c.worker_id) for c in plan.fallbacks] == [
        ("gpu", "w4"),
        ("gpu", "w2"),
        ("gpu", "w1"),
        ("gpu", "w0"),
        ("host", "w3"),
        ("host", "w4"),
    ]


def test_fallbacks_are_few() -> None:
    copies = [record(f"w{i:02}", "serving") for i in range(20)]
    assert len(plan_worker_chains(cluster(*copies, record("x")), 1, MODEL_BYTES).fallbacks) == MAX_FALLBACKS


# --- less than was asked for -----------------------------------------------------------------------


def test_workers_that_are_spare_and_too_small_are_not_said_to_be_none() -> None:
    small = [record(name, arena_bytes=MODEL_BYTES - 1) for name in ("w1", "w2")]
    plan = plan_worker_chains(cluster(record("w0", "serving"), *small), 1, MODEL_BYTES)
    why = f"the arenas of 2 spare workers hold less than {MODEL_BYTES} bytes: raise BLITZ_WORKER_ARENA_MIB"
    assert plan.left_out == (f"1 of 1 more instances have no worker: {why}",)
    mixed = plan_worker_chains(cluster(record("w0", "serving"), small[0], record("w3")), 2, MODEL_BYTES)
    assert mixed.left_out[0] == "1 of 2 more instances have no worker: 1 worker is spare"
    assert mixed.left_out[1].startswith("1 spare worker's arena holds less than")


def test_more_targets_than_workers_give_a_smaller_plan_that_says_what_it_left_out() -> None:
    plan = plan_worker_chains(cluster(record("w0", "serving"), record("w1")), 3, MODEL_BYTES)
    assert plan.targets == ("w1",)
    assert plan.left_out == ("2 of 3 more instances have no worker: 1 worker is spare",)


def test_that_workers_are_drained_is_a_reason() -> None:
    drained = [msgspec.structs.replace(record(name), cordoned=True) for name in ("w1", "w2")]
    ends = msgspec.structs.replace(record("w3"), cordoned=True, stopping=True)
    small = msgspec.structs.replace(record("w4", arena_bytes=MODEL_BYTES - 1), cordoned=True)
    plan = plan_worker_chains(cluster(record("w0", "serving"), *drained, ends, small), 1, MODEL_BYTES)
    assert plan.left_out == (
        "1 of 1 more instances have no worker: no worker is spare",
        "drained: w1, w2 (blitzscale workers undrain)",
    )
    assert plan_worker_chains(cluster(record("w0", "serving"), record("w9"), *drained), 1, MODEL_BYTES).left_out == ()


def test_no_spare_worker_gives_no_chain() -> None:
    plan = plan_worker_chains(cluster(record("w0", "serving")), 1, MODEL_BYTES)
    assert plan.chains == ()
    assert plan.left_out


def test_a_worker_with_wrong_facts_does_not_keep_the_others_from_being_planned() -> None:
    found = cluster(
        record("w0", "serving", nic_gbps=-1.0), record("w1", "serving"), record("w2", nic_gbps=0.0), record("w3")
    )
    plan = plan_worker_chains(found, 2, MODEL_BYTES)
    assert plan.links == (("w1", "w3"),)
    assert plan.left_out[0] == "1 of 2 more instances have no worker: 1 worker is spare"
    assert ["w0" in plan.left_out[1], "w2" in plan.left_out[2]] == [True, True]


@pytest.mark.parametrize("hops", [2, 3, 7, 50])
def test_filling_a_chain_takes_under_two_per_cent_unless_the_floor_forbids(hops: int) -> None:
    chunk = chunk_bytes(MODEL_BYTES, hops)
    assert chunk % MIN_CHUNK_BYTES == 0
    assert MIN_CHUNK_BYTES <= chunk <= MAX_CHUNK_BYTES
    assert chunk == MIN_CHUNK_BYTES or (hops - 1) * chunk <= 0.02 * MODEL_BYTES


def test_a_single_hop_takes_the_largest_chunk() -> None:
    assert chunk_bytes(MODEL_BYTES, 1) == MAX_CHUNK_BYTES


def test_two_leaves_with_a_copy_each_give_two_chains() -> None:
    spare = [record(f"w{i}", leaf=f"leaf-{i % 2}") for i in range(2, 6)]
    sources = [record("w0", "serving", leaf="leaf-0"), record("w1", "serving", leaf="leaf-1")]
    plan = plan_worker_chains(cluster(*sources, *spare), 4, MODEL_BYTES)
    assert paths(plan.chains) == [
        [("gpu", "w0", "w2"), ("gpu", "w2", "w4")],
        [("gpu", "w1", "w3"), ("gpu", "w3", "w5")],
    ]


def test_every_worker_without_a_domain_is_a_hop_of_its_own() -> None:
    spare = [record(f"t{i}", host=f"h{i % 3}") for i in range(9)]
    sources = [record("s0", "serving", host="h0"), record("s1", "serving", host="h1")]
    plan = plan_worker_chains(cluster(*sources, *spare, links=(("s0", "t0"), ("s1", "t1"))), 9, MODEL_BYTES)
    assert all(len(hop.targets) == 1 for chain in plan.chains for hop in chain.hops)
    assert sorted(plan.targets) == sorted(w.worker.worker_id for w in spare)


# --- prefill instances that ship KV ------------------------------------------------------------------


def prefill(worker_id: str, **fields: object) -> WorkerRecord:
    return with_role(record(worker_id, "serving", **fields), "prefill")  # type: ignore[arg-type]


def with_role(one: WorkerRecord, role: Role) -> WorkerRecord:
    assert one.instance is not None
    return msgspec.structs.replace(one, instance=msgspec.structs.replace(one.instance, role=role))


@pytest.mark.parametrize("other", ["decode", "colocated", "host"])
def test_what_ships_kv_sends_no_weights_while_another_can(other: str) -> None:
    # In every way but its role the prefill instance is the better source.
    copy = record("z", host_copy="ready") if other == "host" else with_role(record("z", "serving"), other)  # type: ignore[arg-type]
    decoder = with_role(record("d", "draining"), "decode")
    plan = plan_worker_chains(cluster(prefill("a"), decoder, copy, record("t1"), record("t2")), 2, MODEL_BYTES)
    sources = {s.source for chain in plan.chains for hop in chain.hops for s in hop.stripes}
    assert "a" not in sources
    assert "z" in sources
    assert any("a" in line and "avoided" in line for line in plan.explain)


def test_a_prefill_instance_that_ships_no_kv_to_other_hosts_is_a_source_like_any_other() -> None:
    for decoder in ((), (with_role(record("d", "serving", host="h-a"), "decode"),)):
        plan = plan_worker_chains(cluster(prefill("a"), *decoder, record("t1")), 1, MODEL_BYTES)
        assert plan.links == (("a", "t1"),)


def test_what_ships_kv_starts_a_chain_where_another_tail_is_wanted_and_nobody_else_can() -> None:
    decoder = with_role(record("d", "serving"), "decode")
    sees = cluster(prefill("a"), decoder, record("t1"), record("t2"))
    assert plan_worker_chains(sees, 2, MODEL_BYTES).tails in (("t1",), ("t2",))
    two = plan_worker_chains(sees, 2, MODEL_BYTES, tails=2)
    assert set(two.tails) == {"t1", "t2"}
    assert {source for source, _ in two.links} == {"a", "d"}
