"""How long messages take between processes. One number each: no queueing, no jitter.

The defaults are what a message takes over a NATS server on the same network, from the sender's publish to the
receiver's handler in an event loop with little to do: two hops of a tenth of a millisecond, coding and a turn of the
loop.
"""

from __future__ import annotations

from typing import NamedTuple


class Latencies(NamedTuple):
    """In seconds."""

    submit_s: float = 0.0005
    """A request, from the gateway to its instance's worker; it carries the prompt."""
    answer_s: float = 0.0003
    """The worker's answer to that: it has the request, or refuses it."""
    tokens_s: float = 0.0003
    """Tokens, ends and failures of requests, from a worker to the gateway."""
    load_s: float = 0.0003
    """An instance's load report, to the monitor and to the gateway."""
    queues_s: float = 0.0003
    """A gateway's queue report, to the monitor."""
    routes_s: float = 0.0003
    """That routes have changed, from the pool to the gateway and to the monitor."""
    snapshot_s: float = 0.001
    """The monitor's question to the pool for the whole registry, and its answer."""
    demand_s: float = 0.0003
    """A demand, from the monitor to the planner."""
    heartbeat_s: float = 0.002
    """What a worker is now, to the pool, which writes it down; and the pool's requests to workers."""
    progress_s: float = 0.0003
    """How far a worker is with a plan, to the planner."""
    plan_s: float = 0.003
    """A plan, through the stream that keeps it, to its workers."""
    connect_s: float = 0.02
    """From a plan at its targets to their first bytes: they make an instance, and connect to those that send."""
    split_s: float = 0.03
    """That the planner takes to split a pair's batches."""
    serve_s: float = 0.01
    """From a copy's last byte to an instance that serves: the last unit is verified, and the engine starts."""
    departed_s: float = 0.002
    """That a worker has died, from NATS, which sees its connection closed, to the gateway, which asks for it."""
    silent_s: float = 0.2
    """To workers that it exchanges weights, KV and layers with: they ask for one that is silent for so long."""
    lease_s: float = 2.0
    """To the pool: its lease runs out."""


LOCAL_NATS = Latencies()
