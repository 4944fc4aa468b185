"""What a plan is made from: the registry's facts and the transfers in flight, for one model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from services.planner.core.multicast.explain import MAX_NAMES, shortened
from services.planner.core.multicast.spare import SpareOfEngine, SpareWorkers
from services.planner.core.multicast.topology import Topologies, Topology, with_copy_holders
from services.planner.core.multicast.traffic import (
    BUSY_NIC_SHARE,
    NetworkTraffic,
    Transfers,
    placed_copies,
    serving_flows,
    transfer_flows,
)
from shared.engines import offer_of
from shared.messages.common import Role
from shared.messages.registry import ModelRecord, WorkerInfo, WorkerRecord

WAITS_ELSEWHERE = "the model's engine waits on others"


@dataclass(frozen=True, slots=True)
class WorkerCopy:
    """A copy of the model that a worker holds: in its GPU, or in its host's memory."""

    worker: WorkerInfo
    kind: Literal["gpu", "host"] = "gpu"
    instance_id: str = ""
    """Of a GPU copy."""
    draining: bool = False
    sending: bool = False
    """It sends weights of another plan now."""
    ready_s: float = 0.0
    """When a copy that still loads will be whole, from now."""
    ships_kv: bool = False
    """Of a prefill instance, while there are decode instances of its weights on other hosts."""

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything that planning one model's scale operation looks at. Sequences are in the order of worker ids."""

    topology: Topology
    workers: Mapping[str, WorkerInfo]
    """All that the topology knows."""
    spare: SpareWorkers
    """Workers that are free and can hold the model."""
    traffic: NetworkTraffic
    copies: tuple[WorkerCopy, ...] = ()
    """Complete ones."""
    serves: bool = False
    """An instance of the model has all weights, whether others can read them or not."""
    loading: tuple[WorkerCopy, ...] = ()
    """Copies that will be complete: they forward what they receive."""
    refused: tuple[str, ...] = ()
    """Workers that could take part if what they report did not contradict other workers, and the contradictions."""
    unfit: tuple[str, ...] = ()
    """Spare workers that cannot hold the model, in words: by their arenas, and by their engines."""
    drained: tuple[str, ...] = ()
    """Workers that would be spare, had an operator not taken them out."""

    def host_holders(self) -> dict[str, list[str]]:
        """Workers with a complete host copy, by host."""
        holders: dict[str, list[str]] = {}
        for copy in self.copies:
            if copy.kind == "host":
                holders.setdefault(copy.worker.host, []).append(copy.worker_id)
        return holders


class Clusters:
    """The registry's facts and the planner's transfers at one moment, from which each model's ``Cluster`` is made.

    What is the same for all models is looked at once, so that a round for many of them costs little more than for one.
    """

    def __init__(
        self,
        records: Iterable[WorkerRecord],
        *,
        transfers: Transfers | None = None,
        busy_nic_share: float = BUSY_NIC_SHARE,
        topologies: Topologies | None = None,
    ) -> None:
        """``transfers`` None plans as if no NIC carried anything. ``topologies``: those of earlier moments."""
        self.records = sorted(records, key=_worker_id)
        self._index = {record.worker.worker_id: index for index, record in enumerate(self.records)}
        self._by_model: dict[str, list[WorkerRecord]] = {}
        self._by_hash: dict[str, list[WorkerRecord]] = {}
        self._spare: dict[str, WorkerInfo] = {}
        self._drained: list[WorkerInfo] = []
        for record in self.records:
            for name in {record.instance.model} if record.instance is not None else {record.lease_model} - {""}:
                self._by_model.setdefault(name, []).append(record)
            hashes = {c.model_hash for c in record.host_copies}
            for model_hash in hashes | ({record.instance.model_hash} if record.instance is not None else set()):
                self._by_hash.setdefault(model_hash, []).append(record)
            if record.state == "spare" and not record.lease_plan_id:
                if not record.leaves:
                    self._spare[record.worker.worker_id] = record.worker
                elif not record.stopping:
                    self._drained.append(record.worker)
        self._topology = topology = (topologies or Topologies()).of(r.worker for r in self.records)
        known = [r for r in self.records if r.worker.worker_id in topology.gpus]
        self._workers = {r.worker.worker_id: r.worker for r in known}
        running = (*transfers.running, *placed_copies(self.records)) if transfers is not None else ()
        self._senders = {source for source, _ in running}
        self._traffic = NetworkTraffic(
            topology,
            transfer_flows(topology, running, transfers.gbps if transfers is not None else {}),
            serving_flows(topology, known, transfers, busy_nic_share) if transfers is not None else (),
        )
        self._offering: dict[str, SpareOfEngine] = {}
        """Spare workers, by what they offer."""

    @property
    def num_spare(self) -> int:
        """Workers that no plan has, whatever they can hold."""
        return len(self._spare)

    def of_model(self, name: str) -> Sequence[WorkerRecord]:
        """Workers with an instance of a model, or leased for one."""
        return self._by_model.get(name, ())

    def copies_at(self, model: ModelRecord) -> tuple[WorkerInfo, ...]:
        """Workers that hold host copies of the model that the pool placed, and that stay; also those that load."""
        mine = self._by_hash.get(model.model_hash, ())
        return tuple([r.worker for r in mine if not r.leaves and _has_placed(r, model)])

    def take(self, worker_ids: Iterable[str], plan_id: str, model: str, role: Role) -> None:
        """These workers are no longer spare: a plan of this round has them, and they count as leased."""
        leased = []
        for worker_id in worker_ids:
            worker = self._spare.pop(worker_id, None)
            if worker is not None:
                for offering in self._offering.values():
                    offering.take(worker)
            index = self._index[worker_id]
            self.records[index] = record = msgspec.structs.replace(
                self.records[index], lease_plan_id=plan_id, lease_model=model, lease_role=role
            )
            leased.append(record)
        for offering in self._offering.values():
            for spare in offering.large_enough.values():
                spare.take([record.worker.worker_id for record in leased])
        # What was returned before stays as it was.
        self._by_model[model] = sorted([*self._by_model.get(model, ()), *leased], key=_worker_id)

    def give_roles(self, model: str, roles: Mapping[str, Role]) -> None:
        """This round gives these instances (by id) of a model other roles."""
        changed = []
        for record in self._by_model[model]:
            held = record.instance
            if held is not None and held.instance_id in roles:
                held = msgspec.structs.replace(held, role=roles[held.instance_id])
                record = msgspec.structs.replace(record, instance=held)  # noqa: PLW2901
                self.records[self._index[record.worker.worker_id]] = record
            changed.append(record)
        self._by_model[model] = changed

    def of(
        self,
        model: ModelRecord,
        *,
        remaining_s: Mapping[tuple[str, str], float] | None = None,
        avoided: Mapping[str, str] | None = None,
        at_least: int = 0,
        num_wanted: int = 0,
    ) -> Cluster:
        """The cluster as ``model`` sees it.

        ``remaining_s``: how long instances that load by running plans will take, by (worker id, instance id); only
        those can be sources before they are whole. ``avoided``: workers that are not to load the model now, and why;
        unless fewer than ``at_least`` others are spare. ``num_wanted``: so many are looked for; if the model's
        engine waits on as many, it is these.
        """
        mine = self._by_hash.get(model.model_hash, ())
        holders = {r.worker.worker_id for r in mine if _holds_on_host(r, model)}
        topology = with_copy_holders(self._topology, (r.worker for r in mine), holders)
        decodes_at = {r.worker.host for r in mine if r.instance is not None and r.instance.role == "decode"}
        copies: list[WorkerCopy] = []
        loading: list[WorkerCopy] = []
        for r in mine:
            name = r.worker.worker_id
            if name not in topology.gpus:
                continue
            sending = name in self._senders
            if r.instance is not None and _is_copy_of(r, model):
                instance_id = r.instance.instance_id
                remaining = (remaining_s or {}).get((name, instance_id))
                if r.instance.is_source:
                    leaves = r.state == "draining" or r.leaves or r.instance.copy == "leaves"
                    ships_kv = r.instance.role == "prefill" and bool(decodes_at - {r.worker.host})
                    copies.append(WorkerCopy(r.worker, "gpu", instance_id, leaves, sending, ships_kv=ships_kv))
                elif r.state in ("loading", "live", "serving") and not r.instance.is_complete and remaining is not None:
                    loading.append(WorkerCopy(r.worker, "gpu", instance_id, False, sending, remaining))
            if name in holders:
                copies.append(WorkerCopy(r.worker, "host", sending=sending))
        offering = self._offering_of(model.engine)
        num_small = offering.num_smaller(model.weights_bytes)
        shunned = {w: why for w, why in sorted((avoided or {}).items()) if self._is_spare_for(w, model)}
        num_others = len(offering) - num_small - len(shunned)
        for worker_id in list(shunned)[: max(0, at_least - num_others)]:
            del shunned[worker_id]
        spare = self._spare_for(model, offering)
        if model.engine:
            shunned |= self._cold(spare, shunned, model, num_wanted)
        could = holders | {r.worker.worker_id for r in mine if _is_copy_of(r, model)}
        refused = {w: why for w, why in topology.refused.items() if w in could or self._is_spare_for(w, model)}
        return Cluster(
            topology=topology,
            workers=self._workers,
            spare=spare.without(shunned) if shunned else spare,
            traffic=self._traffic,
            copies=tuple(copies),
            serves=any(r.instance is not None and r.instance.is_complete and _is_copy_of(r, model) for r in mine),
            loading=tuple(loading),
            refused=(
                *shortened([f"worker {w} is left out: {why}" for w, why in refused.items()], MAX_NAMES),
                *shortened([f"worker {w} is avoided: {why}" for w, why in shunned.items()], MAX_NAMES),
            ),
            unfit=(*self._without(model.engine, offering), *_too_small(num_small, model.weights_bytes)),
            drained=tuple([w.worker_id for w in self._drained if w.can_hold(model)]),
        )

    def _cold(
        self, spare: Iterable[WorkerInfo], shunned: Collection[str], model: ModelRecord, num_wanted: int
    ) -> dict[str, str]:
        """Of the others, those where the model's engine does not wait, if it waits on enough; and why."""
        rest = [worker.worker_id for worker in spare if worker.worker_id not in shunned]
        records = (self.records[self._index[worker_id]] for worker_id in rest)
        kind = model.kind
        warm = {r.worker.worker_id for r in records if r.warm is not None and r.warm.is_for(kind, model.model_hash)}
        if not 0 < num_wanted <= len(warm):
            return {}
        return {worker_id: WAITS_ELSEWHERE for worker_id in sorted(rest) if worker_id not in warm}

    def _is_spare_for(self, worker_id: str, model: ModelRecord) -> bool:
        worker = self._spare.get(worker_id)
        return worker is not None and worker.can_hold(model)

    def _offering_of(self, engine: str) -> SpareOfEngine:
        known = self._offering.get(engine)
        if known is None:
            offer = (worker.arena_bytes for worker in self._spare.values() if worker.offers(engine))
            known = self._offering[engine] = SpareOfEngine(offer, engine)
        return known

    def _spare_for(self, model: ModelRecord, offering: SpareOfEngine) -> SpareWorkers:
        """The same for all models of one engine that fit into the same arenas."""
        size = offering.size_of(model.weights_bytes)
        known = offering.large_enough.get(size)
        if known is None:
            fit = [w for w in self._spare.values() if w.can_hold(model)]
            workers = [w for w in fit if w.worker_id in self._topology.gpus]
            known = offering.large_enough[size] = SpareWorkers(workers, self._topology, self._traffic)
        return known

    def _without(self, engine: str, offering: SpareOfEngine) -> tuple[str, ...]:
        """Workers that do not offer the engine, in words."""
        if (engine or self.records) and not any(record.worker.offers(engine) for record in self.records):
            return (f"no worker offers {offer_of(engine)}",)
        num = self.num_spare - len(offering)
        whose = "1 spare worker does not" if num == 1 else f"{num} spare workers do not"
        return (f"{whose} offer {offer_of(engine)}",) if num else ()


def _too_small(num: int, num_bytes: int) -> tuple[str, ...]:
    whose = "1 spare worker's arena holds" if num == 1 else f"the arenas of {num} spare workers hold"
    return (f"{whose} less than {num_bytes} bytes: raise BLITZ_WORKER_ARENA_MIB",) if num else ()


def _worker_id(record: WorkerRecord) -> str:
    return record.worker.worker_id


def _is_copy_of(record: WorkerRecord, model: ModelRecord) -> bool:
    held = record.instance
    return held is not None and (held.model_hash, held.layout_hash) == (model.model_hash, model.layout_hash)


def _has_placed(record: WorkerRecord, model: ModelRecord) -> bool:
    wanted = (model.model_hash, model.layout_hash, False)
    stay = (c for c in record.host_copies if c.state != "retired")
    return any((c.model_hash, c.layout_hash, c.cached) == wanted for c in stay)


def _holds_on_host(record: WorkerRecord, model: ModelRecord) -> bool:
    wanted = (model.model_hash, model.layout_hash, "ready")
    return any((c.model_hash, c.layout_hash, c.state) == wanted for c in record.host_copies)
