"""A worker's parts, built in order: each gets the parts that it needs, which exist by then."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from services.worker.config import WorkerConfig
from services.worker.device.device import Device
from services.worker.instance.factory import InstanceFactory
from services.worker.instance.host_group import HostGroup, group_name
from services.worker.instance.instance import InstanceSlot
from services.worker.instance.load_reporter import LoadReporter
from services.worker.instance.progress import ProgressReporter
from services.worker.instance.registration import ClockSkew, Registration, WorkerStanding
from services.worker.kv_transfer.connector import KvConnector
from services.worker.kv_transfer.departures import Departures
from services.worker.kv_transfer.migration import Migrator
from services.worker.kv_transfer.receiver import KvReceiver
from services.worker.kv_transfer.sender import KvSender
from services.worker.live.roles import PairRoles
from services.worker.mutation import Mutation
from services.worker.node.facts import NodeFacts
from services.worker.node.gpu_facts import GpuFacts
from services.worker.node.nic_meter import NicMeter
from services.worker.node.traffic import TrafficReporter
from services.worker.orders import Orders
from services.worker.requests.inbox import Inbox
from services.worker.requests.step_announcer import StepAnnouncer
from services.worker.scaling import Scaling
from services.worker.weights.host_copies import HostCopies
from services.worker.weights.host_store import HostStore
from services.worker.weights.mover import WeightMover
from services.worker.weights.pace import Pace, Paces
from services.worker.weights.peers import PeerChannels
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.messages.registry import ModelRecord, WarmEngine, WorkerInfo
from shared.transport.base import TensorTransport

METER_INTERVAL_S = 0.1
"""Traffic is averaged over no less: reports may come in bursts."""


def worker_info(
    config: WorkerConfig, node: NodeFacts, transport: TensorTransport, *, pid: int, incarnation: str
) -> WorkerInfo:
    """How this worker introduces itself."""
    gpu = node.gpu or GpuFacts()
    return WorkerInfo(
        worker_id=config.worker_id,
        incarnation=incarnation,
        host=config.host,
        device=config.device,
        engine=config.engine,
        transport_address=transport.address,
        arena_bytes=config.arena_bytes,
        kv_bytes=config.kv_bytes,
        leaf=node.leaf,
        nic_gbps=node.nic_gbps,
        pid=pid,
        nic=node.nic,
        scale_up_domain=node.scale_up_domain,
        scale_up_gbps=node.scale_up_gbps,
        host_link_gbps=node.host_link_gbps,
        ssd_gbps=node.ssd_gbps,
        host_cache_bytes=config.host_cache_bytes,
        gpu_name=gpu.name,
        gpu_uuid=gpu.uuid,
        gpu_capability=gpu.capability_text,
        gpu_memory_bytes=gpu.total_bytes,
        engines=config.engines,
    )


class Parts:
    """What a worker is made of, connected and not yet running. The service starts, drains and closes them."""

    def __init__(
        self,
        bus: Bus,
        transport: TensorTransport,
        config: WorkerConfig,
        info: WorkerInfo,
        node: NodeFacts,
        device: Device,
        *,
        metrics: CollectorRegistry,
        on_engine_failure: Callable[[BlitzError], None],
        fatal: Callable[[str], None],
    ) -> None:
        """``on_engine_failure`` is called on the engine's thread; ``fatal(why)`` must end the process soon."""
        worker_id, silence_s, interval_s = config.worker_id, config.stall_s, config.report_interval_s
        self.slot = slot = InstanceSlot()
        self.store = store = HostStore(config.host_cache_bytes, device)
        held = _Held(slot, store, NicMeter(node.device), lambda: self.factory.warm_engine)
        self.registration = registration = Registration(
            bus, info, held.standing, held.model, ClockSkew(config.clock_skew_s, metrics)
        )
        self.peers = peers = PeerChannels(bus, transport, info)
        slot.when_changed(registration.changed)
        slot.when_changed(peers.look_soon)
        self.traffic = TrafficReporter(info, transport.traffic, peers.transports, metrics=metrics)

        self.inbox = inbox = Inbox(bus, info.process, slot.current, looks_every_s=interval_s)
        progress = ProgressReporter(bus, worker_id)
        paces = Paces(Pace(config.ssd_gbps), Pace(config.host_link_gbps)) if config.limit_reads else Paces()
        self.mover = mover = WeightMover(bus, transport, info, peers, progress, stall_s=silence_s, paces=paces)
        self.host_copies = HostCopies(worker_id, store, mover, registration, changed=slot.changed, fatal=fatal)
        self.departures = Departures(bus, info, peers, inbox, silence_s=silence_s, metrics=metrics)
        self.kv_sender = KvSender(self.departures, slot.current, metrics=metrics)
        step_listener = StepAnnouncer(bus, inbox, metrics=metrics)
        self.factory = InstanceFactory(
            config,
            device,
            inbox.on_output,
            on_engine_failure,
            gpu_name=info.gpu_name,
            prefill_listener=self.kv_sender,
            step_listener=step_listener,
        )
        connector = KvConnector(transport, device)
        self.kv_receiver = KvReceiver(bus, connector, info, peers, inbox, slot.current)
        self.migrator = Migrator(bus, worker_id, self.departures, slot.current, self.kv_receiver.begun_at_s)
        self.scaling = Scaling(
            worker_id,
            slot,
            self.factory,
            mover,
            registration,
            self.host_copies,
            progress,
            self.migrator.leave,
            fatal=fatal,
        )
        self.pair_roles = PairRoles(
            bus, connector, info.process, peers, inbox, self.kv_sender, progress, slot, silence_s=silence_s
        )
        slot.when_loaded(self.pair_roles.loaded)
        for part in (self.pair_roles, self.departures, self.kv_receiver):
            slot.before_gone(part.instance_gone)
        inbox.cooperate(self.pair_roles, self.departures, self.kv_receiver)
        self.load_reporter = LoadReporter(
            bus,
            info.process,
            slot.current,
            HostGroup(group_name(config.nats_url, config.host), config.host, interval_s=interval_s),
            at_intervals=(inbox.expire, self.kv_receiver.expire),
            interval_s=interval_s,
            metrics=metrics,
        )
        self.mutation = Mutation(worker_id, slot, registration, progress, self.load_reporter.report_now)
        self.orders = Orders(
            bus,
            info.process,
            self.scaling.on_scale_plan,
            self.scaling.on_drain_plan,
            self.pair_roles.on_assignment,
            self.mutation.on_mutate_plan,
            self.migrator.on_migrate_plan,
        )


class _Held:
    """What is in this worker, for the registry."""

    def __init__(
        self, slot: InstanceSlot, store: HostStore, meter: NicMeter, warm: Callable[[], WarmEngine | None]
    ) -> None:
        """``warm``: what waits for the next instance."""
        self._slot = slot
        self._warm = warm
        self._store = store
        self._meter = meter
        self._metered_at_s = float("-inf")
        self._nic_gbps = (0.0, 0.0)

    def standing(self) -> WorkerStanding:
        """As of now."""
        instance, now_s = self._slot.current(), time.monotonic()
        if now_s - self._metered_at_s >= METER_INTERVAL_S:
            self._metered_at_s = now_s
            self._nic_gbps = self._meter.rates(now_s)
        copies = self._store.report()
        if instance is None:
            return WorkerStanding("spare", None, copies, *self._nic_gbps, self._warm())
        return WorkerStanding(instance.state, instance.info(), copies, *self._nic_gbps)

    def model(self, model_hash: str) -> ModelRecord | None:
        """The model of anything that is held here, if the registry lost it."""
        instance = self._slot.current()
        if instance is not None and instance.record.model_hash == model_hash:
            return instance.record
        return self._store.record(model_hash)
