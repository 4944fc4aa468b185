"""Who may do what on the bus: one table. The servers' configuration is made from it (``compose.credentials``).

A kind of service is one user. The table says who sends and who receives on each subject; everything else (inboxes,
replies, discovery, JetStream's own subjects) follows from it. What is not in the table is refused by the server.

To add a subject: build it in ``shared.subjects``, and add its row here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from shared import subjects
from shared.subjects import Process

Kind = Literal["gateway", "monitor", "planner", "pool", "worker"]
User = Literal["gateway", "monitor", "planner", "pool", "worker", "operator"]
KINDS: tuple[Kind, ...] = get_args(Kind)
USERS: tuple[User, ...] = get_args(User)
"""The services, and the person who looks after them (``nats micro``, ``nats stream``)."""

INBOX = "_INBOX"
_STANDS_FOR_ANY = "any-0f6c1d"
_ANY_PROCESS = Process(_STANDS_FOR_ANY, _STANDS_FOR_ANY)
_JS = "$JS.API"


def inbox_prefix(kind: str) -> str:
    """Where replies to a kind of service arrive: no other kind may listen there."""
    return f"{INBOX}.{kind}"


def user_names(user: User) -> tuple[str, str]:
    """What ``user`` is called by the server: two names with the same rights. A name has one password there, so the new
    one goes with the other name while both are taken (``compose.rotation``)."""
    return user, f"{user}-2"


_USERS_BY_NAME: dict[str, User] = {name: user for user in USERS for name in user_names(user)}


def user_of(name: str) -> User | None:
    """Whose name on the server this is; None: of nobody in the table."""
    return _USERS_BY_NAME.get(name)


@dataclass(frozen=True, slots=True)
class Row:
    """One subject. ``stream``: what is sent is an event that this JetStream stream keeps, and its receivers read it
    there; else they subscribe."""

    build: Callable[..., str]
    subject: str
    """With ``*`` for each name in it."""
    senders: tuple[Kind, ...]
    receivers: tuple[Kind, ...]
    stream: str = ""


def _row(
    build: Callable[..., str],
    senders: tuple[Kind, ...],
    receivers: tuple[Kind, ...],
    *,
    operation: str = "",
    stream: str = "",
    with_optional: bool = False,
) -> Row:
    """``with_optional``: the longer form of a subject that has two."""
    parameters = inspect.signature(build).parameters.values()
    names = [
        _ANY_PROCESS if p.annotation == Process.__name__ else _STANDS_FOR_ANY
        for p in parameters
        if with_optional or p.default is p.empty
    ]
    subject = build(operation) if operation else build(*names)
    return Row(build, subject.replace(_STANDS_FOR_ANY, "*"), senders, receivers, stream)


def _operations(build: Callable[[str], str], owner: Kind, senders: dict[str, tuple[Kind, ...]]) -> tuple[Row, ...]:
    return tuple(_row(build, kinds, (owner,), operation=operation) for operation, kinds in senders.items())


_GATEWAY: tuple[Kind, ...] = ("gateway",)
_PLANNER: tuple[Kind, ...] = ("planner",)
_POOL: tuple[Kind, ...] = ("pool",)
_WORKER: tuple[Kind, ...] = ("worker",)

TABLE: tuple[Row, ...] = (
    # Requests and their tokens.
    _row(subjects.worker_submit, _GATEWAY, _WORKER),
    _row(subjects.worker_cancel, ("gateway", "worker"), _WORKER),
    _row(subjects.worker_ack, _GATEWAY, _WORKER),
    _row(subjects.worker_resend, ("gateway", "worker"), _WORKER),
    _row(subjects.tokens, _WORKER, _GATEWAY),
    _row(subjects.gateway_heartbeat, _GATEWAY, ("gateway", "worker")),
    # Weights, pairs and decode hand-over: workers among themselves.
    _row(subjects.worker_feed, _WORKER, _WORKER),
    _row(subjects.worker_feed_state, _WORKER, _WORKER),
    _row(subjects.worker_stop_feed, _WORKER, _WORKER),
    _row(subjects.worker_feed_ended, _WORKER, _WORKER),
    _row(subjects.worker_checksums, _WORKER, _WORKER),
    _row(subjects.worker_fetch, _WORKER, _WORKER),
    _row(subjects.worker_live, _WORKER, _WORKER),
    _row(subjects.worker_decode, _WORKER, _WORKER),
    _row(subjects.worker_pair_ended, _WORKER, _WORKER),
    # Who holds an id: whoever starts asks, and the pool asks the one that it knows.
    _row(subjects.gateway_holder, _GATEWAY, _GATEWAY),
    _row(subjects.gateway_holder, _GATEWAY, _GATEWAY, with_optional=True),
    _row(subjects.worker_holder, _WORKER, _WORKER),
    _row(subjects.worker_holder, _POOL, _WORKER, with_optional=True),
    # Host copies.
    _row(subjects.worker_hold_copy, _POOL, _WORKER),
    _row(subjects.worker_drop_copy, _POOL, _WORKER),
    _row(subjects.worker_can_read, _POOL, _WORKER),
    # What was carried for what, when somebody wants to know.
    _row(subjects.worker_traffic, _GATEWAY, _WORKER),
    # Load and what follows from it.
    _row(subjects.load, _WORKER, ("gateway", "monitor", "planner")),
    _row(subjects.host_load, _WORKER, ("gateway", "monitor", "planner")),
    _row(subjects.queue, _GATEWAY, ("gateway", "monitor", "planner")),
    _row(subjects.latencies, _GATEWAY, _GATEWAY),
    _row(subjects.key_usage, _GATEWAY, _GATEWAY),
    _row(subjects.demand, ("monitor",), _PLANNER),
    _row(subjects.verdicts, _GATEWAY, ("monitor",)),
    _row(subjects.progress, _WORKER, ("gateway", "planner")),
    _row(subjects.live_reports, _WORKER, ("gateway", "planner")),
    # The registry.
    *_operations(
        subjects.pool,
        "pool",
        {
            "heartbeat": _WORKER,
            "restore_model": _WORKER,
            "retire_copy": _WORKER,
            "snapshot": ("gateway", "monitor", "planner", "worker"),
            "gpu_time": _GATEWAY,
            "add_model": _GATEWAY,
            "set_model": _GATEWAY,
            "remove_model": _GATEWAY,
            "cordon_worker": _GATEWAY,
            "lease_batch": _PLANNER,
            "release": _PLANNER,
            "set_floor": _PLANNER,
            "lead": ("monitor", "planner"),
        },
    ),
    _row(subjects.route_changes, _POOL, ("gateway", "monitor", "planner")),
    # Plans and their records.
    *_operations(
        subjects.planner,
        "planner",
        {
            "scale": _GATEWAY,
            "record": _GATEWAY,
            "records": _GATEWAY,
            "decisions": _GATEWAY,
            "split": _WORKER,
            "destinations": _WORKER,
        },
    ),
    # What planners tell their successors, and what they tell workers.
    _row(subjects.scale_plans, _PLANNER, _PLANNER, stream=subjects.PLAN_STREAM),
    _row(subjects.drain_plans, _PLANNER, _PLANNER, stream=subjects.PLAN_STREAM),
    _row(subjects.mutate_plans, _PLANNER, _PLANNER, stream=subjects.PLAN_STREAM),
    _row(subjects.zigzag_assignments, _PLANNER, _PLANNER, stream=subjects.PLAN_STREAM),
    _row(subjects.worker_plans, _PLANNER, _WORKER, stream=subjects.PLAN_STREAM),
    _row(subjects.scale_records, _PLANNER, _PLANNER, stream=subjects.RECORD_STREAM),
    _row(subjects.decisions, _PLANNER, _PLANNER, stream=subjects.RECORD_STREAM),
    # The server's own: no client may send on the first, or listen on the second.
    _row(subjects.departures, (), ("gateway", "planner", "pool")),
    _row(subjects.nobody, KINDS, ()),
    # Of the stream that it belongs to only the name is of use.
    _row(subjects.cluster, (), ()),
)


@dataclass(frozen=True, slots=True)
class Replies:
    """Permission to answer what one was asked, and nothing else: so often, and for so long after the question."""

    max_messages: int
    within_s: int


_REPLIES: dict[Kind, Replies] = {
    # The server keeps one entry per question until then: with 11 minutes, 1,000 workers' heartbeats took 190 MB and 9 %
    # of a core in a trial. Adding a model takes longer, so its answer may be "still reading, ask again".
    "pool": Replies(1, 60),
    "planner": Replies(1, 120),
    "monitor": Replies(1, 60),
    "gateway": Replies(1, 120),
    # An event's acknowledgement is an answer, too, and is preceded by "still at it" where it takes long.
    "worker": Replies(16, 120),
}
NAMES_CLUSTER: frozenset[str] = frozenset({"planner", "pool"})
"""Who may say first what the cluster is called."""
SERVICE_VERBS = ("PING", "INFO", "STATS")


@dataclass(frozen=True, slots=True)
class Grant:
    """What one user may publish and subscribe to; patterns as NATS has them."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    replies: Replies | None = None


def grant(user: User) -> Grant:
    """All that ``user`` may do."""
    return _operator() if user == "operator" else _service(user)


def _service(kind: Kind) -> Grant:
    publish = [row.subject for row in TABLE if kind in row.senders]
    subscribe = [row.subject for row in TABLE if kind in row.receivers and not row.stream]
    for row in TABLE:
        if row.stream and kind in row.senders:
            # Who writes a stream makes it, and keeps its limits; a log is never purged, nor deleted from.
            publish += [f"{_JS}.STREAM.{verb}.{row.stream}" for verb in ("INFO", "CREATE", "UPDATE")]
        if row.stream and kind in row.receivers:
            publish += [f"{_JS}.STREAM.INFO.{row.stream}", f"{_JS}.CONSUMER.INFO.{row.stream}.*"]
            # Consumers are named and have one filter: only then does the server look at it.
            publish.append(f"{_JS}.CONSUMER.CREATE.{row.stream}.*.{row.subject}")
    # Whose servers these are: all ask, and who keeps the truth says so first. Nobody changes it.
    publish += [f"{_JS}.STREAM.INFO.{subjects.CLUSTER_STREAM}"]
    if kind in NAMES_CLUSTER:
        publish += [f"{_JS}.STREAM.CREATE.{subjects.CLUSTER_STREAM}"]
    subscribe.append(f"{inbox_prefix(kind)}.>")
    replies = _REPLIES.get(kind)
    if replies is not None:
        for verb in SERVICE_VERBS:
            subscribe += [f"$SRV.{verb}", f"$SRV.{verb}.{kind}", f"$SRV.{verb}.{kind}.*"]
    return Grant(tuple(dict.fromkeys(publish)), tuple(dict.fromkeys(subscribe)), replies)


def _operator() -> Grant:
    """Looks, and touches nothing: who is there, what they count, how far the streams are."""
    publish = ["$SRV.>", subjects.nobody(), f"{_JS}.INFO"]
    publish += [f"{_JS}.STREAM.{verb}" for verb in ("NAMES", "LIST", "INFO.*")]
    publish += [f"{_JS}.CONSUMER.{verb}" for verb in ("NAMES.*", "LIST.*", "INFO.*.*")]
    return Grant(tuple(publish), (f"{inbox_prefix('operator')}.>", subjects.departures()))
