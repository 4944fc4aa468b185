"""Live scaling in a round: finds the instances that could be helped, and chooses the pairs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from services.planner.core.live.load import LoadView
from services.planner.core.live.pairs import Selection, SourceCandidate, select_pairs, zigzag_assignments
from services.planner.core.multicast.chains import WorkerChains
from services.planner.core.multicast.overhead import Overheads, Way, ways_of
from services.planner.core.operations.operations import Operations
from services.planner.core.rounds.settings import LiveSettings
from shared.engines import traits_of
from shared.messages.common import TAKES_PROMPTS, LiveChoice, Role
from shared.messages.live import ZigzagAssignment
from shared.messages.plans import ScalePlan
from shared.messages.registry import ModelRecord, WorkerRecord
from shared.profile import Profile


class FindProfile(Protocol):
    """The profile of instances of that kind, if one is known."""

    def __call__(
        self, *, model_hash: str, layout_hash: str, engine: str, device: str, gpu_name: str
    ) -> Profile | None: ...


class PairPlanner:
    """Chooses the pairs of a plan by the load that was reported last."""

    def __init__(
        self, operations: Operations, settings: LiveSettings, overheads: Overheads, find_profile: FindProfile
    ) -> None:
        self._operations = operations
        self._overheads = overheads
        self._settings = settings
        self._find_profile = find_profile
        self.load = LoadView(assumed_tokens_per_s=settings.assumed_tokens_per_s, report_ttl_s=settings.report_ttl_s)
        """What instances and gateways said last; kept here alone."""

    def is_at_work(self, instance_id: str) -> bool:
        """Whether an instance had requests when it reported last."""
        return self.load.is_at_work(instance_id)

    def load_s(self, model: str) -> float:
        """How long an instance of the model took to load; 0: none has said."""
        return self.load.load_s(model)

    def choice(self, model: ModelRecord, asked: LiveChoice, role: Role) -> LiveChoice:
        """What a request for instances of ``role`` comes to. A decode instance never loads live: weights and KV would
        both come in."""
        if role not in TAKES_PROMPTS or not traits_of(model.engine).lends_layers:
            return "never"
        return self._settings.choice if asked == "auto" else asked

    def candidates(
        self, model: ModelRecord, workers: Iterable[WorkerRecord], role: Role, now_s: float
    ) -> tuple[SourceCandidate, ...]:
        """The queue of each instance that could be a source for new instances of ``role``. ``workers``: all that have
        an instance of the model; ``now_s``: monotonic."""
        if not traits_of(model.engine).lends_layers:
            return ()
        sources = self._sources(model, workers)
        # Of all of them: what gateways hold goes to instances of either role.
        queues = self.load.candidates(
            model.name,
            tuple(sources),
            slo_ttft_s=model.slo_ttft_s or self._settings.slo_ttft_s,
            now_s=now_s,
            in_pairs=self._operations.instances_in_pairs(),
            profiles={i: known for i, w in sources.items() if (known := self.profile_of(model, w)) is not None},
        )
        roles = {instance_id: w.instance.role for instance_id, w in sources.items() if w.instance is not None}
        return tuple([queue for queue in queues if roles[queue.instance_id] == role])

    def profile_of(self, model: ModelRecord, record: WorkerRecord) -> Profile | None:
        """Of the model's instances on such a worker."""
        worker = record.worker
        return self._find_profile(
            model_hash=model.model_hash,
            layout_hash=model.layout_hash,
            engine=worker.engine_of(model),
            device=worker.device,
            gpu_name=worker.gpu_name,
        )

    def _sources(self, model: ModelRecord, workers: Iterable[WorkerRecord]) -> dict[str, WorkerRecord]:
        """Serving instances of these very weights that run prefills and are to stay, by instance id."""
        leaving = self._operations.instances_to_drain()
        return {
            w.instance.instance_id: w
            for w in workers
            if w.instance is not None
            and w.state == "serving"
            and not w.leaves
            and w.instance.role in TAKES_PROMPTS
            and (w.instance.model, w.instance.model_hash) == (model.name, model.model_hash)
            and w.instance.instance_id not in leaving
        }

    def select(
        self,
        model: ModelRecord,
        candidates: tuple[SourceCandidate, ...],
        planned: WorkerChains,
        asked: LiveChoice,
        role: Role,
    ) -> Selection:
        """The pairs between them and the tails of a plan for ``role``, as the request asks for them."""
        choice = self.choice(model, asked, role)
        if not traits_of(model.engine).lends_layers:
            return Selection((), (f"instances of the engine {model.engine} lend no layers",))
        if role not in TAKES_PROMPTS:
            return Selection((), ("decode instances have no prompts to share, and KV comes in beside the weights",))
        if choice == "never":
            return Selection((), ("asked for" if asked == "never" else "the planner's default is never",))
        predicted_s = planned.predicted_s
        tails = {t: predicted_s[t] for t in planned.tails}
        return select_pairs(candidates, tails, choice=choice, share_left=role == "prefill")

    def assignments(
        self, plan: ScalePlan, planned: WorkerChains, selection: Selection, workers: Iterable[WorkerRecord]
    ) -> tuple[ZigzagAssignment, ...]:
        """The first revision of each pair's assignment."""
        if not selection.pairs:
            return ()  # whoever could be a source: to know who, all operations are looked at
        ways = ways_of(planned.chains)
        return zigzag_assignments(
            plan,
            selection.pairs,
            self._sources(plan.model, workers),
            planned.predicted_s,
            policy=self._settings.policy,
            slo_tbt_s=self._settings.slo_tbt_s,
            start_s={pair.target: self._start_s(plan.model, ways[pair.target]) for pair in selection.pairs},
        )

    def _start_s(self, model: ModelRecord, way: Way) -> float:
        return self._overheads.of(model.model_hash, way.kind).before(way.hops)
