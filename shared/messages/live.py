"""Live scaling: the assignment of a pair, and what its two members say to each other (design of the protocol:
``docs/decisions/0013-pairs.md``; paper, section 5.2).

The *source* is an overloaded instance that has all layers, the *target* one that loads. The planner publishes who they
are. The source hands batches of prompts over, the target runs the layers that it has, the source pulls batches back
with their activations and KV. What ends in ``_ago_s`` is in seconds before the message was sent.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.messages.codec import Message
from shared.messages.common import Count, Figure, LivePolicy, WaitSeconds
from shared.messages.generation import Submit
from shared.messages.plans import ChainMember, DrainPlan, MigratePlan, MutatePlan, ScalePlan


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """The source may not pull a batch before the target has run ``num_layers`` of it, and the target stops there."""

    batch_id: str
    num_layers: int


class ZigzagAssignment(Message, frozen=True, kw_only=True, tag="zigzag_assignment.v1"):
    """Two instances scale live together. An event; a later ``revision`` of the same pair only sets gates."""

    pair_id: str
    plan_id: str
    """The target's scale plan."""
    model: str
    source: ChainMember
    target: ChainMember
    """Its ``epoch`` is that of its lease: an assignment for an older one is void."""
    policy: LivePolicy = "zigzag"
    why: str = ""
    layers_ready_s: tuple[float, ...] = ()
    """Per decoder layer, how long after the target's plan it is expected to have it."""
    loaded_s: float = 0.0
    """How long after its plan the target is expected to have everything."""
    slo_tbt_s: float = 0.1
    valid_s: float
    """Who has not begun so long after the stream took it never does."""
    revision: int = 0
    gates: tuple[Gate, ...] = ()
    term: Count
    """As in ``ScalePlan``."""


class WorkerOrder(Message, frozen=True, kw_only=True, tag="worker_order.v1"):
    """What a planner wants of one worker, in one ordered stream per worker: exactly one of these."""

    scale: ScalePlan | None = None
    """With the hops that concern this worker, and no others."""
    drain: DrainPlan | None = None
    zigzag: ZigzagAssignment | None = None
    mutate: MutatePlan | None = None
    migrate: MigratePlan | None = None


class SplitBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that waits; ``layer_s``: expected seconds of one of its layers."""

    batch_id: str
    layer_s: float


class PlanSplit(Message, frozen=True, kw_only=True, tag="plan_split.v1"):
    """The source tells the planner what waits, in first-come order; gates may come as the pair's next revision."""

    pair_id: str
    batches: tuple[SplitBatch, ...]
    source_free_s: float
    """How long until then."""
    pull_s: float = 0.0
    """Expected seconds that a pull takes of the source."""


class LiveOffer(Message, frozen=True, kw_only=True, tag="live_offer.v1"):
    """Source to target: let us begin. ``NotFound``: the target does not load that instance (yet); ``Conflict``: it has
    another pair, or needs none any more."""

    assignment: ZigzagAssignment


class HandOver(Message, frozen=True, kw_only=True, tag="hand_over.v1"):
    """Source to target: a batch for its queue. ``Overloaded``: no capacity for its KV now.

    Its hidden states ``[num_tokens, hidden_size]`` follow over the transport, under the tag of ``serial``. Repeating is
    harmless.
    """

    pair_id: str
    batch_id: str
    serial: Count
    """Counts the pair's batches from 0; handed over one after the other, so it is also their order."""
    layer_s: float
    requests: tuple[Submit, ...]
    """Of which the target becomes the owner if it finishes the batch: prompt and output so far are the batch's tokens,
    one request after another."""
    behind_seal: bool = False
    """It arrived after the queue was sealed."""


class Seal(Message, frozen=True, kw_only=True, tag="seal.v1"):
    """Source to target: ``count`` batches were waiting when the pair began. ``Conflict``: some are missing."""

    pair_id: str
    count: Count


class Pull(Message, frozen=True, kw_only=True, tag="pull.v1"):
    """Source to target: the earliest batch, please. Repeated with the same claim id it gives the same batch."""

    pair_id: str
    claim_id: str
    serial: Count
    """Counts the pair's claims from 0: the tags of the tensors carry it."""
    wait_s: WaitSeconds
    """How long the answer may wait for something to pull."""


class Pulled(Message, frozen=True, kw_only=True, tag="pulled.v1"):
    """The answer. With a batch of which layers were run, its hidden states follow; its KV waits for ``PullKv``."""

    batch_id: str = ""
    """Empty: nothing can be pulled."""
    first_layer: int = 0
    """First layer that the source runs."""
    layers_ready: int = 0
    loaded: bool = False
    """The target has everything."""
    can_dissolve: bool = False
    """Cooperation has nothing left to gain."""
    kv_direct: bool = False
    """The KV of the layers that were run is at the decode instances, or on its way there, for all requests of the
    batch. The target keeps it until the claim is settled: ``PullKv`` gets it if a decode instance is lost."""


class PullKv(Message, frozen=True, kw_only=True, tag="pull_kv.v1"):
    """Source to target: KV of layers ``first_layer <= i < last_layer`` of a batch that it pulled or was given, please;
    a receive is posted. It follows in one message under the tag of ``serial`` and ``first_layer``. Repeating is
    harmless. ``Conflict``: the batch is not the source's, or settled."""

    pair_id: str
    batch_id: str
    serial: Count
    """Of the claim."""
    first_layer: int
    last_layer: int


class Settle(Message, frozen=True, kw_only=True, tag="settle.v1"):
    """Source to target: these claims are settled, free the batches. Unknown ones are ignored. The claim of a batch that
    was given at the end is called ``claim_id/batch_id`` after the ``Dissolve``."""

    pair_id: str
    claim_ids: tuple[str, ...]


class Dissolve(Message, frozen=True, kw_only=True, tag="dissolve.v1"):
    """Source to target: let us part. Repeating gives the same shares. What is given stays at the target until it is
    settled."""

    pair_id: str
    claim_id: str
    first_serial: Count
    """Of the claims that the given batches are; one each."""
    source_busy_s: Figure
    """What the source still needs for what it has."""
    reason: str = ""


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that the source gets. Its hidden states follow if ``first_layer`` is not 0, as for a pull."""

    batch_id: str
    first_layer: int
    serial: int


class LayerRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of prompt batches that one side ran, per bucket of ``bucket_s``."""

    started_ago_s: Figure
    """The first bucket."""
    bucket_s: Figure
    counts: tuple[Count, ...] = ()


class Dissolved(Message, frozen=True, kw_only=True, tag="dissolved.v1"):
    """Batches in first-come order. The target owns what it kept, the source what was given and what is not named."""

    kept: tuple[str, ...]
    given: tuple[Given, ...]
    finished: tuple[str, ...]
    """The target finished these before, and owns them, too. Without those that the source has acknowledged."""
    layer_runs: LayerRuns


class Taken(Message, frozen=True, kw_only=True, tag="taken.v1"):
    """Target to source: it finished these batches and owns their requests."""

    pair_id: str
    batch_ids: tuple[str, ...]
    loaded: bool = False
    """The target has everything."""


class PairEnded(Message, frozen=True, kw_only=True, tag="pair_ended.v1"):
    """One member to the other: the pair is over, and not as planned. Sent once; it may be lost."""

    pair_id: str
    reason: str
    finished: tuple[str, ...] = ()
    """From the target: batches that it finished and owns, without those that the source has acknowledged."""


class LiveBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a batch: layers run by each side."""

    batch_id: str
    num_requests: Count
    num_tokens: Count
    target_layers: Count
    source_layers: Count
    first_token_ago_s: Figure


class LiveReport(Message, frozen=True, kw_only=True, tag="live_report.v1"):
    """The source's report on a pair: on what is new while it runs, and on the whole once it has ended."""

    pair_id: str
    plan_id: str
    source: str
    """Worker ids."""
    target: str
    policy: LivePolicy
    outcome: Literal["running", "dissolved", "failed"]
    reason: str
    started_ago_s: Figure
    first_cooperative_token_ago_s: Figure | None = None
    """First token of a batch of which both sides ran layers."""
    batches: tuple[LiveBatch, ...] = ()
    """All of them; while the pair runs, those that were done since the last report. That one may be lost."""
    source_runs: LayerRuns | None = None
    """This and the next two come at the end only."""
    target_runs: LayerRuns | None = None
    tokens: LayerRuns | None = None
    """Output tokens of the source's engine, per bucket."""
