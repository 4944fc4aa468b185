"""Who is there: models, workers and their instances, and what they report. Half of the workers serve.

The first model has a third of the instances; the others share the rest. Every model has one host copy, each on a host
of its own as far as there are enough. What instances report varies by chance.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from bench.sim.cluster import Cluster
from bench.sim.fabric import Fabric, Gpu
from bench.sim.models import known_model
from shared.messages.load import LoadReport, ModelQueue, QueueReport
from shared.messages.registry import HostCopy, InstanceInfo, ModelRecord, WorkerHeartbeat, WorkerInfo

GIB = 1 << 30
GPUS_PER_HOST = 4
HOSTS_PER_LEAF = 16
GPUS_PER_MODEL = 20
"""Where the number of models is not said."""
BLOCK_TOKENS = 16
BUSY_SLOTS = 0.1
"""Of an instance's, at most, while nothing happens."""


def num_models(num_gpus: int) -> int:
    """As many as a cluster of that size has, where nothing else is said."""
    return max(1, num_gpus // GPUS_PER_MODEL)


@dataclass(slots=True)
class Worker:
    """A worker, and what it would report now."""

    info: WorkerInfo
    instance: InstanceInfo | None = None
    copies: tuple[HostCopy, ...] = ()
    nic_gbps: float = 0.0
    sequence: int = 0

    def heartbeat(self) -> WorkerHeartbeat:
        """The next."""
        self.sequence += 1
        return WorkerHeartbeat(
            worker=self.info,
            state=self.instance.state if self.instance is not None else "spare",
            instance=self.instance,
            sequence=self.sequence,
            host_copies=self.copies,
            nic_egress_gbps=self.nic_gbps,
            nic_ingress_gbps=self.nic_gbps,
        )


class Population:
    """All of a cluster."""

    def __init__(self, num_gpus: int, models: int, seed: int) -> None:
        """``num_gpus``: a multiple of ``GPUS_PER_HOST``. ``models``: at most a tenth of that."""
        self._rng = random.Random(seed)
        hosts = num_gpus // GPUS_PER_HOST
        self.cluster = _cluster(hosts)
        self._known = known_model("llama3-8b", self.cluster.gpu)
        self.profile = self._known.profile
        self.workers = {gpu.gpu_id: Worker(self._info(gpu)) for gpu in Fabric(self.cluster).gpus.values()}
        ids = list(self.workers)
        serving = ids[::2]
        shares = _shares(len(serving), models)
        self.models = tuple(self._record(i, minimum) for i, minimum in enumerate(shares))
        names = [model for model, share in zip(self.models, shares, strict=True) for _ in range(share)]
        self._rng.shuffle(names)
        for number, (worker_id, model) in enumerate(zip(serving, names, strict=True)):
            self.begin(worker_id, f"first-{worker_id}", model, epoch=number + 1)
        for i, model in enumerate(self.models):
            self._hold(self.workers[ids[i * hosts // models * GPUS_PER_HOST + 1]], model)

    def _record(self, index: int, minimum: int) -> ModelRecord:
        name = f"model-{index:05}"
        return msgspec.structs.replace(
            self._known.record,
            name=name,
            model_hash=sha256(name.encode()).hexdigest()[:32],
            slo_ttft_s=self._known.slo_ttft_s,
            slo_tbt_s=self._known.slo_tbt_s,
            serving="colocated",
            # While nothing happens, there is what is wanted.
            min_instances=minimum,
        )

    def _info(self, gpu: Gpu) -> WorkerInfo:
        cluster = self.cluster
        return WorkerInfo(
            worker_id=gpu.gpu_id,
            incarnation="1",
            host=gpu.host,
            device="cuda",
            engine="mock",
            transport_address=gpu.gpu_id.encode(),
            arena_bytes=int(cluster.gpu_memory_gib * GIB / 2),
            kv_bytes=int(cluster.gpu_memory_gib * GIB / 2),
            leaf=gpu.nic.leaf,
            nic=gpu.nic.nic_id,
            nic_gbps=cluster.nic_gbps,
            scale_up_domain=gpu.domain,
            scale_up_gbps=cluster.scale_up_gbps,
            host_link_gbps=cluster.host_link_gbps,
            ssd_gbps=cluster.ssd_gbps,
            host_cache_bytes=int(cluster.host_memory_gib * GIB / cluster.gpus_per_host),
        )

    def _hold(self, worker: Worker, model: ModelRecord) -> None:
        copy = HostCopy(
            model=model.name,
            model_hash=model.model_hash,
            layout_hash=model.layout_hash,
            num_bytes=model.weights_bytes,
            state="ready",
            serial=len(worker.copies) + 1,
        )
        worker.copies += (copy,)

    # --- instances ---------------------------------------------------------------------------

    @property
    def instances(self) -> list[str]:
        """Ids of the workers with one."""
        return [worker_id for worker_id, worker in self.workers.items() if worker.instance is not None]

    def counts(self) -> dict[str, int]:
        """Instances by model."""
        found = dict.fromkeys([model.name for model in self.models], 0)
        for worker in self.workers.values():
            if worker.instance is not None:
                found[worker.instance.model] += 1
        return found

    def begin(
        self,
        worker_id: str,
        instance_id: str,
        model: ModelRecord,
        *,
        epoch: int,
        plan_id: str = "",
        loads: bool = False,
    ) -> None:
        """A worker has an instance, which serves, or ``loads``."""
        self.workers[worker_id].instance = InstanceInfo(
            instance_id=instance_id,
            model=model.name,
            model_hash=model.model_hash,
            layout_hash=model.layout_hash,
            state="loading" if loads else "serving",
            role="colocated",
            epoch=epoch,
            layers_ready=0 if loads else model.basics.num_layers,
            weights_digest="" if loads else "digest",
            max_running_requests=256,
            max_queued_tokens=32768,
            context_tokens=model.basics.max_position,
            plan_id=plan_id,
        )

    def end(self, worker_id: str) -> None:
        """The worker is spare."""
        self.workers[worker_id].instance = None

    def restart(self, worker_id: str) -> None:
        """Its process is another, with nothing on the GPU and no copy."""
        worker = self.workers[worker_id]
        worker.info = msgspec.structs.replace(worker.info, incarnation=f"{int(worker.info.incarnation) + 1}")
        worker.instance, worker.copies, worker.sequence = None, (), 0

    # --- reports -----------------------------------------------------------------------------

    def new_traffic(self, worker_id: str) -> None:
        """Its NIC carries something else."""
        self.workers[worker_id].nic_gbps = self._rng.uniform(0.1, 0.4) * self.cluster.nic_gbps

    def load(self, worker_id: str, now_s: float, *, queued: int = 0) -> LoadReport:
        """Of a worker with an instance; so many requests wait there."""
        instance = self.workers[worker_id].instance
        assert instance is not None
        running = self._rng.randint(1, int(BUSY_SLOTS * instance.max_running_requests))
        blocks = self.workers[worker_id].info.kv_bytes // (BLOCK_TOKENS * self._known.kv_bytes_per_token)
        return LoadReport(
            worker_id=worker_id,
            incarnation=self.workers[worker_id].info.incarnation,
            instance_id=instance.instance_id,
            model=instance.model,
            state=instance.state,
            role=instance.role,
            queued_requests=queued,
            queued_tokens=1024 * queued,
            running_requests=running,
            running_tokens=1100 * running,
            prefill_tokens_total=int(1000 * now_s),
            decode_tokens_total=int(200 * now_s),
            busy_s_total=now_s / 2,
            kv_blocks_total=blocks,
            kv_blocks_used=min(blocks, running * 70),
            kv_block_tokens=BLOCK_TOKENS,
            oldest_queued_s=0.2 if queued else 0.0,
            prefill_tokens_per_s=8000.0,
            decode_tokens_per_s=900.0,
            decode_base_s=0.02,
            decode_request_s=0.0002,
            load_s=2.0,
            ended_requests_total=int(now_s),
            ended_tokens_total=int(200 * now_s),
        )

    def queues(self, gateway_id: str, now_s: float, *, queued: int = 0) -> QueueReport:
        """Of a gateway that has requests of every model; so many of each wait there."""
        queues = [
            ModelQueue(
                model=model.name,
                queued_requests=queued,
                queued_tokens=1024 * queued,
                arrived_requests_total=int(2 * now_s),
                arrived_prompt_tokens_total=int(2048 * now_s),
                inflight_requests=self._rng.randint(1, 9),
                head_tokens=1024 if queued else 0,
            )
            for model in self.models
        ]
        return QueueReport(gateway_id=gateway_id, models=tuple(queues))


def _cluster(hosts: int) -> Cluster:
    """Like cluster A of the paper, with hosts of four GPUs."""
    return Cluster(
        name=f"of-{hosts}-hosts",
        hosts=hosts,
        gpus_per_host=GPUS_PER_HOST,
        gpus_per_domain=GPUS_PER_HOST,
        scale_up_gbps=1600.0,
        nics_per_host=GPUS_PER_HOST,
        nic_gbps=100.0,
        host_link_gbps=128.0,
        ssds_per_host=GPUS_PER_HOST,
        ssd_gbps=10.0,
        hosts_per_leaf=min(hosts, HOSTS_PER_LEAF),
    )


def _shares(instances: int, models: int) -> list[int]:
    """Of each model: a third for the first, the rest evenly."""
    if models == 1:
        return [instances]
    first = instances // 3
    each, more = divmod(instances - first, models - 1)
    return [first, *[each + (i < more) for i in range(models - 1)]]
