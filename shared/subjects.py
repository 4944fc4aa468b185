"""Every NATS subject, built here and nowhere else.

The subjects of one process have its incarnation in them. It comes with the decision to speak to it (a route, a plan, an
upstream, a pair, a reservation) and is not looked up when something is sent: by then the id may be another's. Only
``holder`` goes without: it asks who has an id.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from shared.errors import BadName

PREFIX = "blitz.v1"
PLAN_STREAM = "BLITZ_PLANS"
"""JetStream stream that keeps every plan."""
RECORD_STREAM = "BLITZ_RECORDS"
"""JetStream stream that keeps the newest records of scale operations and of decisions, whatever their age."""
CLUSTER_STREAM = "BLITZ_CLUSTER"
"""JetStream stream that keeps the name of the cluster whose servers these are, as its description, and nothing else."""

POOL_OPERATIONS = (
    "heartbeat", "add_model", "set_model", "remove_model", "restore_model", "snapshot", "lease_batch",
    "release", "set_floor", "retire_copy", "lead", "cordon_worker", "gpu_time",
)  # fmt: skip
PLANNER_OPERATIONS = ("decisions", "destinations", "scale", "record", "records", "split")

MAX_NAME = 255
_TOKEN = re.compile(r"[A-Za-z0-9_\-]+")


class Process(NamedTuple):
    """One process: its id, and which of its starts. What is meant for one start never reaches the next."""

    id: str
    incarnation: str

    def __str__(self) -> str:
        return self.id


def is_name(value: str) -> bool:
    """Whether it can be part of a subject, as an id and an incarnation must."""
    return len(value) <= MAX_NAME and _TOKEN.fullmatch(value) is not None


def is_process(process: Process) -> bool:
    """Whether a process can be spoken to under that name."""
    return is_name(process.id) and is_name(process.incarnation)


def _token(value: str) -> str:
    if not _TOKEN.fullmatch(value):
        raise BadName(f"{value[:80]!r} cannot be part of a subject: use letters, digits, '-' and '_'")
    return value


def _process(process: Process) -> str:
    return f"{_token(process.id)}.{_token(process.incarnation)}"


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


def tokens(gateway: Process) -> str:
    """TokenBatch, worker to one gateway process."""
    return f"{PREFIX}.gateway.{_process(gateway)}.tokens"


def gateway_heartbeat() -> str:
    """GatewayHeartbeat, gateway to all workers."""
    return f"{PREFIX}.gateway.heartbeat"


def gateway_holder(gateway_id: str, incarnation: str = "") -> str:
    """GetHolder -> Holder, RPC to whoever holds a gateway's id, or to that incarnation of it alone."""
    return _holder("gateway", gateway_id, incarnation)


def worker_holder(worker_id: str, incarnation: str = "") -> str:
    """GetHolder -> Holder, RPC to whoever holds a worker's id, or to that incarnation of it alone."""
    return _holder("worker", worker_id, incarnation)


def _holder(kind: str, name: str, incarnation: str) -> str:
    return f"{PREFIX}.{kind}.{_process(Process(name, incarnation)) if incarnation else _token(name)}.holder"


def worker_submit(worker: Process) -> str:
    """Submit -> Ack, RPC to one worker."""
    return f"{PREFIX}.worker.{_process(worker)}.submit"


def worker_cancel(worker: Process) -> str:
    """Cancel, to one worker."""
    return f"{PREFIX}.worker.{_process(worker)}.cancel"


def worker_ack(worker: Process) -> str:
    """AckTerminal, gateway to one worker."""
    return f"{PREFIX}.worker.{_process(worker)}.ack"


def worker_resend(worker: Process) -> str:
    """Resend -> Ack, RPC to one worker."""
    return f"{PREFIX}.worker.{_process(worker)}.resend"


def worker_fetch(worker: Process) -> str:
    """FetchRange -> Ack, RPC from a receiver to the worker upstream of it."""
    return f"{PREFIX}.worker.{_process(worker)}.fetch"


def worker_checksums(worker: Process) -> str:
    """GetChecksums -> UnitChecksums, RPC from a receiver to the worker upstream of it."""
    return f"{PREFIX}.worker.{_process(worker)}.checksums"


def worker_feed(worker: Process) -> str:
    """Feed -> Ack, RPC from a receiver to the worker whose copy it wants."""
    return f"{PREFIX}.worker.{_process(worker)}.feed"


def worker_feed_state(worker: Process) -> str:
    """GetFeedState -> FeedState, RPC from a receiver to its sender."""
    return f"{PREFIX}.worker.{_process(worker)}.feed_state"


def worker_stop_feed(worker: Process) -> str:
    """StopFeed, from a receiver to its sender."""
    return f"{PREFIX}.worker.{_process(worker)}.stop_feed"


def worker_feed_ended(worker: Process) -> str:
    """FeedEnded, from a sender to its receiver."""
    return f"{PREFIX}.worker.{_process(worker)}.feed_ended"


def worker_hold_copy(worker: Process) -> str:
    """HoldCopy -> Ack, RPC from the pool to one worker."""
    return f"{PREFIX}.worker.{_process(worker)}.hold_copy"


def worker_can_read(worker: Process) -> str:
    """CanRead -> Ack, RPC from the pool to one worker."""
    return f"{PREFIX}.worker.{_process(worker)}.can_read"


def worker_drop_copy(worker: Process) -> str:
    """DropCopy -> Ack, RPC from the pool to one worker."""
    return f"{PREFIX}.worker.{_process(worker)}.drop_copy"


def worker_traffic(worker: Process) -> str:
    """GetTraffic -> WorkerTraffic, RPC from a gateway that is asked for it to one worker."""
    return f"{PREFIX}.worker.{_process(worker)}.traffic"


def worker_live(worker: Process, operation: str) -> str:
    """RPC between the members of a pair (``shared.messages.live``): offer, hand_over, seal, pull, pull_kv, settle,
    dissolve to the target; taken to the source."""
    return f"{PREFIX}.worker.{_process(worker)}.live.{_token(operation)}"


def worker_decode(worker: Process, operation: str) -> str:
    """RPC from a prefill instance's worker to a decode instance's (``shared.messages.disaggregated``): reserve, renew,
    begin, release."""
    return f"{PREFIX}.worker.{_process(worker)}.decode.{_token(operation)}"


def worker_pair_ended(worker: Process) -> str:
    """PairEnded, from one member of a pair to the other."""
    return f"{PREFIX}.worker.{_process(worker)}.pair_ended"


def load() -> str:
    """LoadReport, workers to monitors."""
    return f"{PREFIX}.load.worker"


def host_load() -> str:
    """HostLoad, one worker for all of its host to whoever takes LoadReport (``shared.load_feed``)."""
    return f"{PREFIX}.load.hosts"


def queue() -> str:
    """QueueReport, gateways to monitors."""
    return f"{PREFIX}.load.gateway"


def latencies() -> str:
    """LatencyReport, gateways to those gateways that somebody looks at."""
    return f"{PREFIX}.load.gateway.latencies"


def key_usage() -> str:
    """KeyUsageReport, gateways to gateways."""
    return f"{PREFIX}.load.gateway.keys"


def verdicts() -> str:
    """GetVerdicts -> Verdicts, RPC to the monitor that leads."""
    return f"{PREFIX}.monitor.verdicts"


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


def worker_plans(worker: Process) -> str:
    """WorkerOrder events (JetStream): what one worker has to do."""
    return f"{PREFIX}.plans.worker.{_process(worker)}"


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


def records() -> str:
    """Everything in the record stream."""
    return f"{PREFIX}.records.>"


def cluster() -> str:
    """Nobody sends or listens here: the subject that ``CLUSTER_STREAM`` has to have."""
    return f"{PREFIX}.cluster"


def decisions() -> str:
    """DecisionsMade events (JetStream), planner to planners."""
    return f"{PREFIX}.records.decisions"


def scale_records() -> str:
    """ScaleRecord events (JetStream): operations that have ended, planner to planners."""
    return f"{PREFIX}.records.scale"


def live_reports() -> str:
    """LiveReport events, the sources of pairs to the planner."""
    return f"{PREFIX}.live_reports"


def progress() -> str:
    """ScaleProgress events, workers to planner."""
    return f"{PREFIX}.progress"
