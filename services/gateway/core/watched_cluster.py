"""What is known of the whole cluster while somebody looks at it, and the entities of the feed that show it. Pure.

They hold names and numbers: no prompt, token, key or path.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.core.latencies import RecentLatencies
from services.gateway.core.moves import RecentMoves
from services.gateway.core.router import Router
from shared.messages.live import LiveReport
from shared.messages.load import LoadReport
from shared.messages.operations import ScaleRecord, Unplanned
from shared.messages.progress import ScaleProgress
from shared.messages.registry import GpuTimeReport, WorkerRecord
from shared.registry_view import RegistryView

KINDS: Sequence[str] = ("cluster", "model", "worker", "unplanned", "operation", "load", "pair", "move", "gpu_time")
MAX_LOADS = 400
"""Targets of which the progress is shown: those that were heard of last."""
MAX_PAIRS = 100
MAX_RECENT_BATCHES = 32
"""Of a pair that are shown: the last ones."""
MAX_WORKERS = 200
"""With more, workers and instances are counted, and shown one by one only where an operation is about them."""
_QUOTED_PATH = re.compile(r"""(?P<quote>["'])(?:file://)?/[^"'\n]*/""")
_PATH = re.compile(r"(?:file://|(?<![\w.:/]))/(?:[^\s/\"\\:]+/)+")


class WatchedCluster:
    """The registry, load, operations as they happen, and latencies. Its owner says what came."""

    def __init__(self) -> None:
        self.registry: RegistryView | None = None
        self.silent: set[str] = set()
        """Services that do not answer."""
        self.latencies = RecentLatencies()
        self.moves = RecentMoves()
        self._gpu_time: dict[str, Any] = {}
        """By model."""
        self._records: tuple[ScaleRecord, ...] = ()
        self._shown: dict[str, msgspec.Raw] = {}
        """The records as readers get them, by plan id."""
        self._unplanned: tuple[Unplanned, ...] = ()
        self._counted: _Counted | None = None
        self._loads: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        self._pairs: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()

    @property
    def has_many_workers(self) -> bool:
        return self.registry is not None and len(self.registry.workers) > MAX_WORKERS

    @property
    def is_scaling(self) -> bool:
        """An operation runs."""
        return any(record.status == "running" for record in self._records)

    def on_progress(self, event: ScaleProgress) -> bool:
        """A target tells how far it is. Whether registry and planner know more now, too."""
        known = _newest(self._loads, (event.plan_id[:80], event.worker_id[:255]), MAX_LOADS, "plan", "worker")
        known["event"] = event.event
        known["after_s"] = round(event.after_s, 4)
        known["bytes"] = max(event.received_bytes, known.get("bytes", 0))
        known.setdefault("layers", 0)
        if event.event == "layer_ready":
            known["layers"] = max(known["layers"], event.layer + 1)
        if event.event == "failed":
            known["detail"] = without_paths(event.detail[:300])
        return event.event in ("accepted", "live", "loaded", "serving", "failed", "spare")

    def on_live_report(self, report: LiveReport) -> None:
        """The source of a pair tells what was done."""
        known = _newest(self._pairs, (report.plan_id[:80], report.pair_id[:80]), MAX_PAIRS, "plan", "pair")
        if report.outcome == "running" and known.get("outcome", "running") != "running":
            return  # it was overtaken
        known |= {"source": report.source[:255], "target": report.target[:255], "outcome": report.outcome}
        recent = [[b.num_tokens, b.target_layers, b.source_layers] for b in report.batches[-MAX_RECENT_BATCHES:]]
        if report.outcome == "running":
            known["batches"] = known.get("batches", 0) + len(report.batches)
            recent = [*known.get("recent", ()), *recent][-MAX_RECENT_BATCHES:]
        else:
            known["batches"] = len(report.batches)  # all of them: reports in between may have been lost
        known["recent"] = recent

    def as_before(self, record: ScaleRecord) -> msgspec.Raw | None:
        """What is shown of a record that is as it was; None: it is not. Most have ended."""
        return self._shown.get(record.plan_id) if record in self._records else None

    def take_records(
        self, records: Sequence[ScaleRecord], shown: Mapping[str, msgspec.Raw], unplanned: Sequence[Unplanned]
    ) -> None:
        """The planner's newest operations, and what is shown of them."""
        self._records, self._shown, self._unplanned = tuple(records), dict(shown), tuple(unplanned)

    def take_gpu_time(self, report: GpuTimeReport) -> None:
        """What the pool has counted of models, the empty name for what is none's."""
        of: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for use in report.uses:
            of[use.model][use.state] = round(use.seconds, 1)
        price = report.hour_cost / 3600
        self._gpu_time = {
            name: {
                "model": name,
                "seconds": states,
                "share": round(sum(states.values()) / max(1.0, report.total_s), 4),
                "cost": round(sum(states.values()) * price, 4) if price else None,
            }
            for name, states in of.items()
        }

    def entities(self, reports: Mapping[str, LoadReport], router: Router, now_s: float) -> dict[str, Any]:
        """All of them by name; none: nothing is known yet. ``reports``: the newest ones by instance. ``now_s``:
        monotonic."""
        view = self.registry
        if view is None:
            nothing = {"workers": 0, "states": {}, "summarised": False, "silent": sorted(self.silent)}
            return {"cluster/now": nothing} if "pool" in self.silent else {}
        if self._counted is None or self._counted.view is not view:
            self._counted = _Counted.of(view)
        found: dict[str, Any] = {
            "cluster/now": {
                "workers": len(view.workers),
                "states": self._counted.states,
                "summarised": self.has_many_workers,
                "silent": sorted(self.silent),
            }
        }
        found |= self._models(view, self._counted, reports, router, now_s)
        for worker in self._shown_workers(view):
            found[f"worker/{worker.worker.worker_id}"] = _worker(worker, reports)
        for unplanned in self._unplanned:
            about = f"{unplanned.model}/{unplanned.role}"
            found[f"unplanned/{about}"] = {
                "model": unplanned.model, "role": unplanned.role, "wanted": unplanned.wanted,
                "why": without_paths(unplanned.why),
            }  # fmt: skip
        found |= {f"gpu_time/{name}": use for name, use in self._gpu_time.items()}
        for model, source, target, number in self.moves.ways(now_s):
            way = {"model": model, "from": source, "to": target, "requests": number}
            found[f"move/{model}/{source}/{target}"] = way
        plans = self._shown.keys()
        found |= {f"operation/{plan_id}": record for plan_id, record in self._shown.items()}
        for kind, things in (("load", self._loads), ("pair", self._pairs)):
            for (plan_id, name), thing in things.items():
                if not plans or plan_id in plans:
                    found[f"{kind}/{plan_id}/{name}"] = thing
        return found

    def _models(
        self,
        view: RegistryView,
        counted: _Counted,
        reports: Mapping[str, LoadReport],
        router: Router,
        now_s: float,
    ) -> dict[str, Any]:
        running, queued = Counter[str](), Counter[str]()
        for report in reports.values():
            running[report.model] += report.running_requests
            queued[report.model] += report.queued_requests
        latencies = dict(self.latencies.summaries(now_s))
        return {
            f"model/{name}": {
                "name": name,
                "hash": model.model_hash[:12],
                "layers": model.basics.num_layers,
                "bytes": model.weights_bytes,
                "served_as": model.serving,
                "min": model.min_instances,
                "max": model.max_instances,
                "waiting": router.queued_anywhere(name) + queued[name],
                "running": running[name],
                "states": counted.by_model.get(name, {}),
                **latencies.get(name, {}),
            }
            for name, model in view.models.items()
        }

    def _shown_workers(self, view: RegistryView) -> Iterable[WorkerRecord]:
        if not self.has_many_workers:
            return view.workers
        running = [record for record in self._records if record.status == "running"]
        members = {t.worker_id for r in running for t in r.targets} | {h.source for r in running for h in r.hops}
        return [worker for worker in view.workers if worker.worker.worker_id in members]


@dataclass(frozen=True, slots=True)
class _Counted:
    """What there is of each kind, counted once per view of the registry."""

    view: RegistryView
    states: dict[str, int]
    by_model: dict[str, dict[str, int]]

    @classmethod
    def of(cls, view: RegistryView) -> _Counted:
        states: Counter[str] = Counter()
        by_model: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for worker in view.workers:
            states[worker.state] += 1
            if worker.instance is not None:
                by_model[worker.instance.model][f"{worker.instance.role} {worker.state}"] += 1
        return cls(view, states, {name: dict(sorted(counts.items())) for name, counts in by_model.items()})


def _newest(
    known: OrderedDict[tuple[str, str], dict[str, Any]], key: tuple[str, str], most: int, *names: str
) -> dict[str, Any]:
    """The thing of this key, which is the newest now; those that nothing was heard of for longest go."""
    found = known[key] = known.pop(key) if key in known else dict(zip(names, key, strict=True))
    while len(known) > most:
        known.popitem(last=False)
    return found


def without_paths(text: str) -> str:
    """Errors name files; readers of the feed need not know where they are."""
    return _PATH.sub("…/", _QUOTED_PATH.sub(r"\g<quote>…/", text))


def shown(record: ScaleRecord) -> msgspec.Raw:
    """A record as JSON, without paths."""
    replace = msgspec.structs.replace
    without = replace(
        record,
        reason=without_paths(record.reason),
        explain=tuple(map(without_paths, record.explain)),
        left_out=tuple(map(without_paths, record.left_out)),
        targets=tuple(replace(t, failure=without_paths(t.failure)) if t.failure else t for t in record.targets),
        live=tuple(replace(p, why=without_paths(p.why), reason=without_paths(p.reason)) for p in record.live),
    )
    return msgspec.Raw(msgspec.json.encode(without))


def _worker(record: WorkerRecord, reports: Mapping[str, LoadReport]) -> dict[str, Any]:
    worker, instance = record.worker, record.instance
    found: dict[str, Any] = {
        "id": worker.worker_id,
        "host": worker.host,
        "leaf": worker.leaf,
        "state": "stopping" if record.stopping else record.state,
        "arena": worker.arena_bytes,
        "cordoned": record.cordoned,
        "copies": [
            {"hash": copy.model_hash[:12], "state": copy.state, "bytes": copy.num_bytes, "cached": copy.cached}
            for copy in record.host_copies
        ],
    }
    if instance is not None:
        found |= {
            "instance": instance.instance_id,
            "model": instance.model,
            "role": instance.role,
            "layers": instance.layers_ready,
            "plan": instance.plan_id,
        }
        report = reports.get(instance.instance_id)
        if report is not None:
            found |= {
                "running": report.running_requests,
                "queued": report.queued_requests,
                "queued_tokens": report.queued_tokens,
                "kv_used": report.kv_blocks_used,
                "kv_total": report.kv_blocks_total,
            }
    return found
