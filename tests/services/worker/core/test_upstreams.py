"""Where a target's bytes come from when its upstreams are lost."""

from __future__ import annotations

import pytest

from services.worker.core.upstreams import PlanPart, part_of
from shared.errors import BadRequest
from shared.messages.plans import Chain, ChainMember, Copy, Hop, ScalePlan, SourceKind, Stripe
from tests.processes import INCARNATION
from tests.records import model


def stripe(source: str, target: str, share: float = 1.0, kind: SourceKind = "gpu", cap_gbps: float = 0.0) -> Stripe:
    return Stripe(source=source, source_kind=kind, target=target, share=share, cap_gbps=cap_gbps)


def hop(*stripes: Stripe) -> Hop:
    return Hop(targets=tuple(dict.fromkeys(s.target for s in stripes)), stripes=stripes)


def plan(*chains: tuple[Hop, ...], fallbacks: tuple[Copy, ...] = ()) -> ScalePlan:
    names = {s.source for c in chains for h in c for s in h.stripes} | {t for c in chains for h in c for t in h.targets}
    names |= {copy.worker_id for copy in fallbacks}
    return ScalePlan(
        plan_id="p",
        model=model(),
        role="colocated",
        members=tuple(
            ChainMember(
                worker_id=n,
                incarnation=INCARNATION,
                instance_id=f"i-{n}",
                host=f"h-{n}",
                transport_address=n.encode(),
                epoch=7,
            )
            for n in sorted(names - {""})
        ),
        chains=tuple(Chain(hops=hops, chunk_bytes=1 << 20) for hops in chains),
        fallbacks=fallbacks,
        triggered_at_s=0.0,
        valid_s=60.0,
        term=1,
    )


def part(planned: ScalePlan, worker_id: str) -> PlanPart:
    found = part_of(planned, worker_id)
    assert found is not None
    return found


def order(planned: ScalePlan, worker_id: str) -> list[list[str]]:
    return [[f"{u.kind} {u.worker_id}".strip() for u in s.upstreams] for s in part(planned, worker_id).stripes]


def test_a_member_climbs_its_chain_then_the_fallbacks_then_its_disk() -> None:
    planned = plan(
        (hop(stripe("s", "a")), hop(stripe("a", "b")), hop(stripe("b", "c"))),
        fallbacks=(Copy(worker_id="x", kind="gpu"), Copy(worker_id="y", kind="host")),
    )
    assert order(planned, "c") == [["gpu b", "gpu a", "gpu s", "gpu x", "host y", "disk"]]
    assert order(planned, "a") == [["gpu s", "gpu x", "host y", "disk"]]
    assert part(planned, "c").position == 2
    assert part(planned, "c").member.epoch == 7
    assert part(planned, "c").stripes[0].upstreams[0].transport_address == b"b"


def test_the_head_of_a_disk_chain_reads_and_the_others_climb_to_their_own_disk_last() -> None:
    planned = plan((hop(stripe("", "a", kind="disk")), hop(stripe("a", "b"))))
    assert order(planned, "a") == [["disk"]]
    assert order(planned, "b") == [["gpu a", "disk"]]


def test_a_member_of_a_group_gathers_the_others_stripes_from_them_and_never_waits_in_a_circle() -> None:
    planned = plan(
        (hop(stripe("s", "a", 0.5), stripe("t", "b", 0.5)), hop(stripe("a", "c", 0.5), stripe("b", "d", 0.5)))
    )
    assert order(planned, "a") == [["gpu s", "disk"], ["gpu b", "gpu t", "gpu s", "disk"]]
    above = ["gpu s", "gpu t", "disk"]
    assert order(planned, "d") == [["gpu c", "gpu a", "gpu b", *above], ["gpu b", *above]]
    assert [s.share for s in part(planned, "d").stripes] == [0.5, 0.5]


def test_a_host_copy_in_the_targets_own_process_is_local() -> None:
    planned = plan((hop(stripe("a", "a", kind="host")), hop(stripe("a", "b"))))
    assert order(planned, "a") == [["local a", "disk"]]
    assert order(planned, "b") == [["gpu a", "host a", "disk"]]


def test_nobody_climbs_to_himself() -> None:
    planned = plan(
        (hop(stripe("s", "a")),), fallbacks=(Copy(worker_id="a", kind="gpu"), Copy(worker_id="a", kind="host"))
    )
    assert order(planned, "a") == [["gpu s", "local a", "disk"]]


def test_a_cap_holds_for_the_planned_link_only() -> None:
    planned = plan((hop(stripe("s", "a", 0.5, cap_gbps=2.0), stripe("s", "b", 0.5)),))
    assert [s.cap_gbps for s in part(planned, "a").stripes] == [2.0, 0.0]
    assert [s.cap_gbps for s in part(planned, "b").stripes] == [0.0, 0.0]


def test_sources_and_strangers_have_no_part() -> None:
    planned = plan((hop(stripe("s", "a")),))
    assert part_of(planned, "s") is None
    assert part_of(planned, "stranger") is None


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    planned = plan((hop(stripe("s", "a")), Hop(targets=("b",), stripes=())))
    with pytest.raises(BadRequest, match="no stripes"):
        part_of(planned, "b")
