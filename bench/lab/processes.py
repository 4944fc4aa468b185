"""The lab's own processes: NATS where the namespaces reach it, and a worker inside of a namespace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bench.lab.plan import DATA_DEVICE, MANAGEMENT_ADDRESS, Host, Rate
from compose import children
from compose.child import ChildSpec
from compose.children import Addresses, nats_server
from compose.config import StackConfig, inherited_environment
from compose.forking import ForkServer
from compose.preflight import Findings
from compose.readiness import nats_probe
from compose.server_conf import NATS_CONF
from compose.state_dir import StateDir

_MIB = 1024 * 1024
_KV_MIB = 64
_HOST_COPIES = 2
"""Room for the copy that the pool places and for one that the host-cache strategy keeps."""


def nats_url(addresses: Addresses) -> str:
    """As workers and services see it."""
    return f"nats://{MANAGEMENT_ADDRESS}:{addresses.nats_port}"


def nats_spec(config: StackConfig, state: StateDir, addresses: Addresses) -> ChildSpec:
    """NATS where the namespaces reach it and nobody else does."""
    where = ("--addr", MANAGEMENT_ADDRESS, "--port", str(addresses.nats_port))
    file = state.credentials / NATS_CONF
    argv = (str(nats_server()), "--config", str(file), *where, "--store_dir", str(state.nats))
    probe = nats_probe(MANAGEMENT_ADDRESS, addresses.nats_port)
    return ChildSpec("nats", argv, inherited_environment(), config.stop_grace_s, state.path, probe=probe)


def worker_spec(
    config: StackConfig,
    state: StateDir,
    addresses: Addresses,
    host: Host,
    *,
    rate: Rate,
    arena_mib: int,
    offers_copies: bool,
    holds_instances: bool = True,
    env: Mapping[str, str],
    forks: ForkServer | None = None,
) -> ChildSpec:
    """The worker of one host. ``offers_copies``: memory for copies outside of its arena.
    ``holds_instances``: the arena has room for the model. ``env`` wins over the rest."""
    own_mib = arena_mib if holds_instances else 0
    findings = Findings(prefault_bytes=own_mib * _MIB)
    spec = children.worker_spec(config, state, addresses, host.index, findings, forks)
    own = {
        "BLITZ_NATS_URL": nats_url(addresses),
        "BLITZ_WORKER_HOST": host.namespace,
        "BLITZ_WORKER_NIC": DATA_DEVICE,
        "BLITZ_WORKER_NIC_GBPS": f"{rate.gbps:g}",
        "BLITZ_WORKER_ARENA_MIB": str(own_mib + 1),
        "BLITZ_WORKER_KV_MIB": str(_KV_MIB),
        "BLITZ_WORKER_HOST_CACHE_MIB": str(_HOST_COPIES * (arena_mib + 1) if offers_copies else 0),
        # UCX would otherwise find the shared memory of the one machine, or the unrated interface.
        "UCX_TLS": "tcp",
        # To UCX all hosts of the lab are one; between real ones this is what the transport chooses.
        "UCX_RNDV_THRESH": "inf",
        "UCX_NET_DEVICES": DATA_DEVICE,
    }
    return replace(spec, network=host.namespace, env={**spec.env, **own, **env})
