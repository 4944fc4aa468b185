"""Load, as workers and gateways report it to the monitor (every 100 ms by default)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shared.messages.codec import Message
from shared.messages.common import Count, Figure, InstanceState, Role, SignedCount, SignedFigure
from shared.prefixes import MAX_STEPS, NAME_BYTES
from shared.subjects import Process

MAX_HOT_PREFIXES = 8
PrefixName = Annotated[bytes, Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]


class HotPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """What many prompts of an instance begin with (``shared.prefixes``)."""

    name: PrefixName
    first: PrefixName
    """Of its first step."""
    steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)]
    tokens: Count
    """Of the prompts that begin so, lately."""


class LoadReport(Message, frozen=True, kw_only=True, tag="load.v1"):
    """One instance's load. Counters grow for the instance's life; gauges are now."""

    worker_id: str
    incarnation: str
    """Of the worker's process."""
    instance_id: str
    model: str
    state: InstanceState
    role: Role
    queued_requests: Count
    queued_tokens: Count
    """Prompt tokens accepted and not yet computed."""
    running_requests: Count
    running_tokens: Count
    """Tokens whose KV is held by running requests."""
    prefill_tokens_total: Count
    decode_tokens_total: Count
    busy_s_total: Figure
    """Seconds spent inside engine steps."""
    kv_blocks_total: Count
    kv_blocks_used: Count
    preemptions_total: Count = 0
    kv_block_tokens: Count
    """Tokens of one KV block."""
    oldest_queued_s: Figure = 0.0
    """How long the earliest request has waited that is not begun; 0 when none waits."""
    prefilling_requests: Count = 0
    """Of the running ones, those whose prompt is not computed to its end."""
    prefill_tokens_per_s: Figure = 0.0
    """Prompt tokens per second, decodes apart, as the worker measured it. This and the next three are 0 until it
    has."""
    decode_tokens_per_s: Figure = 0.0
    """Output tokens per second of decode steps, at the largest batch measured."""
    decode_base_s: Figure = 0.0
    """A decode step of n requests takes ``decode_base_s + n * decode_request_s``."""
    decode_request_s: Figure = 0.0
    """0 with a base: not known yet, because no step had two requests."""
    load_s: Figure = 0.0
    """How long this instance took from its plan to serving; 0 while it loads."""
    ended_requests_total: Count = 0
    """Requests that ended here by themselves (stop or length); with the next, how long answers are."""
    ended_tokens_total: Count = 0
    """Their output, from wherever it was computed."""
    head_blocks: Count = 0
    """KV blocks that have to be free for the first waiting request to begin, while there are fewer; 0 when none waits
    for KV."""
    cached_tokens_total: Count = 0
    """Prompt tokens whose KV was there, beside the ``prefill_tokens_total`` that were computed."""
    counted_tokens: Count = 0
    """Tokens of the prompts that ``hot_prefixes`` are of; 0: this report says nothing about them."""
    hot_prefixes: Annotated[tuple[HotPrefix, ...], Meta(max_length=MAX_HOT_PREFIXES)] = ()
    """In one of several reports."""

    @property
    def worker(self) -> Process:
        """Whose it is."""
        return Process(self.worker_id, self.incarnation)


class HostLoad(Message, frozen=True, kw_only=True, tag="host_load.v1"):
    """The reports of several workers of one host, together. A worker that is alone there, or that nobody there hears,
    sends its ``LoadReport`` itself."""

    host: str
    reports: tuple[LoadReport, ...]


class ModelQueue(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway holds for one model and has not sent to an instance."""

    model: str
    queued_requests: Count
    queued_tokens: Count
    arrived_requests_total: Count
    arrived_prompt_tokens_total: Count
    inflight_requests: Count
    head_tokens: Count = 0
    """Prompt tokens of the request that is next; 0 when none waits."""


class QueueReport(Message, frozen=True, kw_only=True, tag="queue.v1"):
    """One gateway's queues."""

    gateway_id: str
    models: tuple[ModelQueue, ...]


class ModelLatencies(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one model that came at one gateway since its last report: how many, and those that came at a time of
    their own by bucket of the gateway's histograms; the last buckets that got none are left out."""

    model: str
    tokens: Count
    """All of them, also those that came together with others of their stream."""
    ttft: tuple[Count, ...]
    """First tokens, by the time since the request's arrival."""
    tbt: tuple[Count, ...]
    """The others, by the time since the token before."""


class MovedRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one model that went from one worker to another, their streams unbroken, since the last report."""

    model: str
    source: str
    target: str
    requests: Count


class LatencyReport(Message, frozen=True, kw_only=True, tag="latency.v1"):
    """One gateway's, once a second while something is new, for those who look at the whole cluster."""

    gateway_id: str
    models: tuple[ModelLatencies, ...]
    moves: tuple[MovedRequests, ...] = ()
    """In one of the reports of a second."""


class KeyUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway has admitted for one API key. Totals are of its life; what was not used comes off them again."""

    name: str
    requests_total: SignedCount
    tokens_total: SignedCount
    open_requests: Count
    requests_left: SignedFigure | None = None
    """In the gateway's bucket, all gateways' usage taken off; None: not limited."""
    tokens_left: SignedFigure | None = None


class KeyUsageReport(Message, frozen=True, kw_only=True, tag="key_usage.v1"):
    """Usage of keys that are in use at one gateway, or just were; several reports if they are many."""

    gateway_id: str
    incarnation: str
    keys: tuple[KeyUsage, ...]


class Demand(Message, frozen=True, kw_only=True, tag="demand.v1"):
    """The monitor's verdict: how many instances of a role a model needs now, and why."""

    publisher: str
    sequence: Count
    model: str
    role: Role
    desired: Count
    observed: Count
    """Serving instances the verdict is based on."""
    triggered_ago_s: Figure
    """How long ago the load first called for this number."""
    reason: str
    term: Count
    """Of the monitor that says so (``shared.messages.registry.Lead``)."""
    idle: Count = 0
    """Of the instances observed, those that another model may have at once: the load does not need them at this moment,
    nor do limits and floors."""
    idle_for_s: Figure | None = None
    """How long ago so many became idle, or how long they were before that ended. Unless None, ``desired`` may be
    ``observed``: nothing is asked for."""
    deficit: Figure = 0.0
    """What the load needs beyond what is there, within limits, as a share of what is there (of one, if nothing is)."""
    spare: Count
    """Of the idle ones, those that would not be missed if what was needed lately came again."""
    urgent: Count
    """Up to this number, prefill instances should rather become decode instances at once, while others load in their
    place: decode lacks them now, and more than prefill would."""
    bound: str = ""
    """The limit that made ``desired`` another number than the load asks for; ``reason`` has it, too. Empty: none."""
