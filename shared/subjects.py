"""Every NATS subject, built here and nowhere else."""

from __future__ import annotations

import re

from shared.errors import BadName

PREFIX = "blitz.v1"
PLAN_STREAM = "BLITZ_PLANS"
"""JetStream stream that keeps every plan."""
RECORD_STREAM = "BLITZ_RECORDS"
"""JetStream stream that keeps the newest records of scale operations, whatever their age."""

POOL_OPERATIONS = (
    "heartbeat", "add_model", "set_model", "remove_model", "restore_model", "snapshot", "lease", "lease_batch",
    "release", "set_floor", "retire_copy", "lead", "cordon_worker",
)  # fmt: skip
PLANNER_OPERATIONS = ("destinations", "scale", "record", "records", "split")

MAX_NAME = 255
_TOKEN = re.compile(r"[A-Za-z0-9_\-]+")


def is_name(value: str) -> bool:
    """Whether a process can be spoken to by that id: whether it can be part of a subject."""
    return len(value) <= MAX_NAME and _TOKEN.fullmatch(value) is not None


def _token(value: str) -> str:
    if not _TOKEN.fullmatch(value):
        raise BadName(f"{value[:80]!r} cannot be part of a subject: use letters, digits, '-' and '_'")
    return value


def _operation(name: str, known: tuple[str, ...]) -> str:
    # A list of its own for each: who may ask for which is decided operation by operation (``shared.permissions``).
    if name not in known:
        raise ValueError(f"no subject for the operation {name!r}: known are {', '.join(known)}")
    return name


def nobody() -> str:
    """No process listens here, and none may. A client asks to learn that the server has read all it sent before."""
    return f"{PREFIX}.nobody"


def departures() -> str:
    """The server's own word that a client's connection is gone (``shared.bus.departures``), to gateways, planner and
    pool."""
    return f"{PREFIX}.departures"


def tokens(gateway_id: str) -> str:
    """TokenBatch, worker to one gateway process."""
    return f"{PREFIX}.gateway.{_token(gateway_id)}.tokens"


def gateway_heartbeat() -> str:
    """GatewayHeartbeat, gateway to all workers."""
    return f"{PREFIX}.gateway.heartbeat"


def gateway_holder(gateway_id: str, incarnation: str = "") -> str:
    """GetHolder -> Holder, RPC to whoever holds a gateway's id, or to that incarnation of it alone."""
    subject = f"{PREFIX}.gateway.{_token(gateway_id)}.holder"
    return f"{subject}.{_token(incarnation)}" if incarnation else subject


def worker_holder(worker_id: str, incarnation: str = "") -> str:
    """GetHolder -> Holder, RPC to whoever holds a worker's id, or to that incarnation of it alone."""
    subject = f"{PREFIX}.worker.{_token(worker_id)}.holder"
    return f"{subject}.{_token(incarnation)}" if incarnation else subject


def worker_submit(worker_id: str) -> str:
    """Submit -> Ack, RPC to one worker."""
    return f"{PREFIX}.worker.{_token(worker_id)}.submit"


def worker_cancel(worker_id: str) -> str:
    """Cancel, to one worker."""
    return f"{PREFIX}.worker.{_token(worker_id)}.cancel"


def worker_ack(worker_id: str) -> str:
    """AckTerminal, gateway to one worker."""
    return f"{PREFIX}.worker.{_token(worker_id)}.ack"


def worker_resend(worker_id: str) -> str:
    """Resend -> Ack, RPC to one worker."""
    return f"{PREFIX}.worker.{_token(worker_id)}.resend"


def worker_fetch(worker_id: str) -> str:
    """FetchRange -> Ack, RPC from a receiver to the worker upstream of it."""
    return f"{PREFIX}.worker.{_token(worker_id)}.fetch"


def worker_checksums(worker_id: str) -> str:
    """GetChecksums -> UnitChecksums, RPC from a receiver to the worker upstream of it."""
    return f"{PREFIX}.worker.{_token(worker_id)}.checksums"


def worker_feed(worker_id: str) -> str:
    """Feed -> Ack, RPC from a receiver to the worker whose copy it wants."""
    return f"{PREFIX}.worker.{_token(worker_id)}.feed"


def worker_feed_state(worker_id: str) -> str:
    """GetFeedState -> FeedState, RPC from a receiver to its sender."""
    return f"{PREFIX}.worker.{_token(worker_id)}.feed_state"


def worker_stop_feed(worker_id: str) -> str:
    """StopFeed, from a receiver to its sender."""
    return f"{PREFIX}.worker.{_token(worker_id)}.stop_feed"


def worker_feed_ended(worker_id: str) -> str:
    """FeedEnded, from a sender to its receiver."""
    return f"{PREFIX}.worker.{_token(worker_id)}.feed_ended"


def worker_hold_copy(worker_id: str) -> str:
    """HoldCopy -> Ack, RPC from the pool to one worker."""
    return f"{PREFIX}.worker.{_token(worker_id)}.hold_copy"


def worker_can_read(worker_id: str) -> str:
    """CanRead -> Ack, RPC from the pool to one worker."""
    return f"{PREFIX}.worker.{_token(worker_id)}.can_read"


def worker_drop_copy(worker_id: str) -> str:
    """DropCopy -> Ack, RPC from the pool to one worker."""
    return f"{PREFIX}.worker.{_token(worker_id)}.drop_copy"


def worker_traffic(worker_id: str) -> str:
    """GetTraffic -> WorkerTraffic, RPC from a gateway that is asked for it to one worker."""
    return f"{PREFIX}.worker.{_token(worker_id)}.traffic"


def worker_live(worker_id: str, operation: str) -> str:
    """RPC between the members of a pair (``shared.messages.live``): offer, hand_over, seal, pull, pull_kv, settle,
    dissolve to the target; taken to the source."""
    return f"{PREFIX}.worker.{_token(worker_id)}.live.{_token(operation)}"


def worker_decode(worker_id: str, operation: str) -> str:
    """RPC from a prefill instance's worker to a decode instance's (``shared.messages.disaggregated``): reserve, renew,
    begin, release."""
    return f"{PREFIX}.worker.{_token(worker_id)}.decode.{_token(operation)}"


def worker_pair_ended(worker_id: str) -> str:
    """PairEnded, from one member of a pair to the other."""
    return f"{PREFIX}.worker.{_token(worker_id)}.pair_ended"


def load() -> str:
    """LoadReport, workers to monitors."""
    return f"{PREFIX}.load.worker"


def host_load() -> str:
    """HostLoad, one worker for all of its host to whoever takes LoadReport (``shared.load_feed``)."""
    return f"{PREFIX}.load.hosts"


def queue() -> str:
    """QueueReport, gateways to monitors."""
    return f"{PREFIX}.load.gateway"


def key_usage() -> str:
    """KeyUsageReport, gateways to gateways."""
    return f"{PREFIX}.load.gateway.keys"


def demand() -> str:
    """Demand, monitor to planner."""
    return f"{PREFIX}.demand"


def pool(operation: str) -> str:
    """Pool RPC: one of ``POOL_OPERATIONS``."""
    return f"{PREFIX}.pool.{_operation(operation, POOL_OPERATIONS)}"


def route_changes() -> str:
    """RouteChanges events, pool to gateways and monitors."""
    return f"{PREFIX}.events.route_changes"


def planner(operation: str) -> str:
    """Planner RPC: one of ``PLANNER_OPERATIONS``."""
    return f"{PREFIX}.planner.{_operation(operation, PLANNER_OPERATIONS)}"


def plans() -> str:
    """Everything in the plan stream."""
    return f"{PREFIX}.plans.>"


def worker_plans(worker_id: str) -> str:
    """WorkerOrder events (JetStream): what one worker has to do."""
    return f"{PREFIX}.plans.worker.{_token(worker_id)}"


def scale_plans() -> str:
    """ScalePlan events (JetStream)."""
    return f"{PREFIX}.plans.scale"


def drain_plans() -> str:
    """DrainPlan events (JetStream)."""
    return f"{PREFIX}.plans.drain"


def mutate_plans() -> str:
    """MutatePlan events (JetStream)."""
    return f"{PREFIX}.plans.mutate"


def zigzag_assignments() -> str:
    """ZigzagAssignment events (JetStream)."""
    return f"{PREFIX}.plans.zigzag"


def scale_records() -> str:
    """ScaleRecord events (JetStream): operations that have ended, planner to planners."""
    return f"{PREFIX}.records.scale"


def live_reports() -> str:
    """LiveReport events, the sources of pairs to the planner."""
    return f"{PREFIX}.live_reports"


def progress() -> str:
    """ScaleProgress events, workers to planner."""
    return f"{PREFIX}.progress"
