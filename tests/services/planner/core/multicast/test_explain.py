from __future__ import annotations

from services.planner.core.multicast.chains import plan_worker_chains
from services.planner.core.multicast.explain import MAX_EDGES
from tests.services.planner.core.multicast.clusters import MODEL_BYTES, cluster, record
from tests.services.planner.core.multicast.test_chains import gpu


def test_every_decision_has_its_line() -> None:
    found = cluster(
        record("w0", "serving"), record("w1", "serving", egress_gbps=5.0), record("w2"), record("w3", egress_gbps=5.0)
    )
    assert plan_worker_chains(found, 2, MODEL_BYTES).explain == (
        "outgoing direction in use, avoided while others are left: w1",
        "order: next to a copy first, then leaf by leaf (leaf-0), there the fastest first",
        "w0 -> w2 at 10 Gbps: leaf leaf-0",
        "w2 -> w3 at 10 Gbps: leaf leaf-0; late in the order: it sends out less than it takes in, so what follows "
        "would starve",
        "chains end in w3",
    )


def test_a_group_that_shares_with_serving_says_so() -> None:
    found = cluster(record("w0", "serving"), record("w2", ingress_gbps=5.0))
    (line, _) = plan_worker_chains(found, 1, MODEL_BYTES).explain
    assert line == (
        "w0 -> w2 at 5 Gbps: leaf leaf-0; shares a NIC's direction, nothing else is left; "
        "last in the order: serving traffic comes in through all its NICs"
    )


def test_a_striped_group_says_which_stripe_comes_from_where() -> None:
    found = cluster(gpu("a", 0, "serving"), gpu("a", 1, "serving", nic_gbps=300.0), gpu("b", 0), gpu("b", 1))
    (line, _) = plan_worker_chains(found, 2, MODEL_BYTES).explain
    assert line.startswith("a-0, a-1 -> b-0, b-1 at 200 Gbps: leaf leaf-0; striped, by what each pair can carry: ")
    assert "a-1 -> b-1 50 %" in line
    assert line.endswith("over the scale-up network")


def test_the_explanation_of_a_large_plan_is_cut() -> None:
    spare = [record(f"w{i:03}") for i in range(1, 200)]
    explain = plan_worker_chains(cluster(record("w000", "serving"), *spare), 199, MODEL_BYTES).explain
    assert len(explain) <= MAX_EDGES + 4
    assert "149 more groups" in " ".join(explain)
