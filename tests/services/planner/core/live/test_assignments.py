"""What the two workers of a pair are told."""

from __future__ import annotations

import msgspec
import pytest

from services.planner.core.live.pairs import Pair, layers_ready_s, zigzag_assignments
from services.planner.core.multicast.chains import WorkerChains, plan_worker_chains
from services.planner.core.multicast.cluster import Cluster
from services.planner.core.operations.plan_events import scale_plan
from shared.layout import layout_of
from shared.messages.live import ZigzagAssignment
from shared.messages.plans import ScalePlan
from shared.messages.registry import LeaseGrant, ModelRecord
from tests.records import spec
from tests.services.planner.core.multicast.clusters import MODEL, MODEL_BYTES, cluster, record

SOURCE = record("w0", "serving")


def planned(model: ModelRecord = MODEL) -> tuple[ScalePlan, WorkerChains, Cluster]:
    found = cluster(SOURCE, record("w1"), record("w2"))
    chains = plan_worker_chains(found, 2, MODEL_BYTES)
    grant = LeaseGrant(plan_id="plan-p", epochs=(("w1", 7), ("w2", 8)))
    plan = scale_plan(
        "plan-p",
        model,
        chains,
        found,
        grant,
        triggered_at_s=99.0,
        valid_s=15.0,
        give_up_s=60.0,
        reason="",
        role="colocated",
        term=1,
    )
    return plan, chains, found


def assignments(model: ModelRecord = MODEL, **predicted_s: float) -> tuple[ZigzagAssignment, ...]:
    plan, chains, _ = planned(model)
    return zigzag_assignments(
        plan,
        [Pair("i-w0", "w2", "because")],
        {"i-w0": SOURCE},
        chains.predicted_s | predicted_s,
        policy="best_effort",
        slo_tbt_s=0.2,
    )


def test_an_assignment_names_both_members_and_their_plan() -> None:
    (made,) = assignments(w2=10.0)
    assert (made.pair_id, made.plan_id, made.model) == ("plan-p-w2", "plan-p", "m")
    assert (made.source.worker_id, made.source.instance_id, made.source.host) == ("w0", "i-w0", "h-w0")
    assert made.source.transport_address == b"w0"
    assert (made.target.worker_id, made.target.instance_id, made.target.epoch) == ("w2", "p-w2", 8)
    assert (made.policy, made.why, made.slo_tbt_s) == ("best_effort", "because", 0.2)
    assert (made.revision, made.gates) == (0, ())
    assert made.valid_s == 60.0
    assert made.loaded_s == 10.0
    assert len(made.layers_ready_s) == MODEL.spec.num_layers


def test_of_a_model_of_a_later_versions_family_no_times_are_told() -> None:
    unknown = msgspec.structs.replace(MODEL.spec, architecture="MambaForCausalLM")
    (made,) = assignments(msgspec.structs.replace(MODEL, spec=unknown), w2=10.0)
    assert (made.loaded_s, made.layers_ready_s) == (10.0, ())


def test_a_models_own_objective_counts() -> None:
    model = ModelRecord(
        name="m",
        path="",
        model_hash="h",
        layout_hash="l",
        spec=spec(),
        weights_bytes=1,
        added_at_s=0.0,
        slo_tbt_s=0.05,
    )
    assert assignments(model)[0].slo_tbt_s == 0.05


def test_without_a_prediction_there_are_no_times() -> None:
    (made,) = assignments(w2=0.0)
    assert (made.layers_ready_s, made.loaded_s) == ((), 0.0)


def test_layers_come_at_an_even_pace_before_embedding_and_head() -> None:
    layout = layout_of(spec())
    times = layers_ready_s(layout, 100.0, 10.0)
    assert len(times) == layout.num_layers
    steps = [later - earlier for earlier, later in zip((100.0, *times), times, strict=False)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    rest = layout.embed.num_bytes + layout.final.num_bytes
    assert times[-1] == pytest.approx(110.0 - 10.0 * rest / layout.num_bytes)


def test_no_pairs_are_no_assignments() -> None:
    plan, chains, _ = planned()
    assert zigzag_assignments(plan, [], {}, chains.predicted_s, policy="zigzag", slo_tbt_s=0.1) == ()
