"""Who may send which message where: the rows of ``shared.permissions``, each with its message, on a running stack."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from shared import subjects
from shared.messages import (
    common,
    copies,
    decisions,
    destinations,
    disaggregated,
    feeds,
    generation,
    identity,
    live,
    load,
    operations,
    plans,
    progress,
    registry,
    traffic,
)
from shared.messages.codec import Message
from shared.permissions import TABLE, USERS, Row, User

LIVE: dict[str, tuple[type[Message], type[Message]]] = {
    "offer": (live.LiveOffer, common.Ack),
    "hand_over": (live.HandOver, common.Ack),
    "seal": (live.Seal, common.Ack),
    "pull": (live.Pull, live.Pulled),
    "pull_kv": (live.PullKv, common.Ack),
    "settle": (live.Settle, common.Ack),
    "dissolve": (live.Dissolve, live.Dissolved),
    "taken": (live.Taken, common.Ack),
}
DECODE: dict[str, tuple[type[Message], type[Message]]] = {
    "reserve": (disaggregated.ReserveDecode, disaggregated.DecodeReserved),
    "renew": (disaggregated.RenewDecode, disaggregated.DecodeRoom),
    "begin": (disaggregated.BeginDecode, common.Ack),
    "release": (disaggregated.ReleaseDecode, common.Ack),
}
TAKES: dict[str, tuple[type[Message], type[Message] | None]] = {
    "worker.*.*.submit": (generation.Submit, common.Ack),
    "worker.*.*.cancel": (generation.Cancel, None),
    "worker.*.*.ack": (generation.AckTerminal, None),
    "worker.*.*.resend": (generation.Resend, common.Ack),
    "gateway.*.*.tokens": (generation.TokenBatch, None),
    "gateway.heartbeat": (generation.GatewayHeartbeat, None),
    "worker.*.*.feed": (feeds.Feed, common.Ack),
    "worker.*.*.feed_state": (feeds.GetFeedState, feeds.FeedState),
    "worker.*.*.stop_feed": (feeds.StopFeed, None),
    "worker.*.*.feed_ended": (feeds.FeedEnded, None),
    "worker.*.*.checksums": (feeds.GetChecksums, feeds.UnitChecksums),
    "worker.*.*.fetch": (feeds.FetchRange, common.Ack),
    "worker.*.*.pair_ended": (live.PairEnded, None),
    "gateway.*.holder": (identity.GetHolder, identity.Holder),
    "gateway.*.*.holder": (identity.GetHolder, identity.Holder),
    "worker.*.holder": (identity.GetHolder, identity.Holder),
    "worker.*.*.holder": (identity.GetHolder, identity.Holder),
    "worker.*.*.hold_copy": (copies.HoldCopy, common.Ack),
    "worker.*.*.drop_copy": (copies.DropCopy, common.Ack),
    "worker.*.*.can_read": (copies.CanRead, common.Ack),
    "worker.*.*.traffic": (traffic.GetTraffic, traffic.WorkerTraffic),
    "load.worker": (load.LoadReport, None),
    "load.hosts": (load.HostLoad, None),
    "load.gateway": (load.QueueReport, None),
    "load.gateway.latencies": (load.LatencyReport, None),
    "load.gateway.keys": (load.KeyUsageReport, None),
    "demand": (load.Demand, None),
    "progress": (progress.ScaleProgress, None),
    "live_reports": (live.LiveReport, None),
    "pool.heartbeat": (registry.WorkerHeartbeat, registry.HeartbeatAck),
    "pool.restore_model": (registry.RestoreModel, common.Ack),
    "pool.retire_copy": (copies.RetireCopy, common.Ack),
    "pool.cordon_worker": (registry.CordonWorker, common.Ack),
    "pool.snapshot": (registry.GetSnapshot, registry.Snapshot),
    "pool.gpu_time": (registry.GetGpuTime, registry.GpuTimeReport),
    "pool.add_model": (registry.AddModel, registry.ModelRecord),
    "pool.set_model": (registry.SetModel, registry.ModelRecord),
    "pool.remove_model": (registry.RemoveModel, common.Ack),
    "pool.lease_batch": (registry.LeaseBatch, registry.LeaseVerdicts),
    "pool.release": (registry.ReleaseWorkers, common.Ack),
    "pool.set_floor": (registry.SetFloor, common.Ack),
    "pool.lead": (registry.Lead, registry.Leadership),
    "events.route_changes": (registry.RouteChanges, None),
    "planner.scale": (operations.StartScale, operations.ScaleRecord),
    "planner.record": (operations.GetScaleRecord, operations.ScaleRecord),
    "planner.records": (operations.ListScaleRecords, operations.ScaleRecords),
    "planner.decisions": (decisions.ListDecisions, decisions.Decisions),
    "monitor.verdicts": (decisions.GetVerdicts, decisions.Verdicts),
    "planner.split": (live.PlanSplit, common.Ack),
    "planner.destinations": (destinations.GetDestinations, destinations.Destinations),
    "plans.scale": (plans.ScalePlan, None),
    "plans.drain": (plans.DrainPlan, None),
    "plans.mutate": (plans.MutatePlan, None),
    "plans.zigzag": (live.ZigzagAssignment, None),
    "plans.worker.*.*": (live.WorkerOrder, None),
    "records.scale": (operations.ScaleRecord, None),
    "records.decisions": (decisions.DecisionsMade, None),
    "nobody": (common.Ack, None),
}
"""What each subject takes, and what it answers (None: nothing)."""
OTHERS = tuple(f"$SRV.{verb}" for verb in ("PING", "INFO", "STATS"))
"""What the operator may send on besides: the services API answers there, with messages of its own."""


@dataclass(frozen=True, slots=True)
class Target:
    """A subject that a user may publish on. ``*`` stands for the ids of those that listen, and their incarnations."""

    user: User
    subject: str
    takes: type[Message]
    answers: type[Message] | None
    stream: bool = False

    @property
    def name(self) -> str:
        return f"{self.user} {self.subject}"

    @property
    def addressee(self) -> str:
        """Kind of service whose id is the first ``*``; empty where there is none."""
        found = re.search(r"(worker|gateway)\.\*", self.subject)
        return found[1] if found else ""


def targets() -> tuple[Target, ...]:
    """All of them, each with each user who may."""
    found = [target for row in TABLE for target in _of_row(row)]
    found += [Target("operator", subject, common.Ack, None) for subject in (*OTHERS, subjects.nobody())]
    return tuple(found)


def _of_row(row: Row) -> Iterator[Target]:
    relative = row.subject.removeprefix(f"{subjects.PREFIX}.")
    users = [cast(User, kind) for kind in row.senders]
    assert set(users) <= set(USERS)
    spoken = {"worker.*.*.live.*": LIVE, "worker.*.*.decode.*": DECODE}.get(relative)
    for user in users:
        if spoken is not None:
            for operation, (takes, answers) in spoken.items():
                yield Target(user, f"{row.subject.removesuffix('*')}{operation}", takes, answers)
        else:
            one, other = TAKES[relative]
            yield Target(user, row.subject, one, other, stream=bool(row.stream))
