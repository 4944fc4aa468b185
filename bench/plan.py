"""``blitzscale bench plan``: how long the multicast planner thinks, over random scenarios."""

from __future__ import annotations

import gc
import math
import random
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.command_line import JsonFile, write
from bench.stats import Summary
from services.planner.core.multicast.plan import plan
from services.planner.core.multicast.topology import Gpu, Host, Nic, Topology, build_topology
from services.planner.core.multicast.traffic import Flow, Source

MODEL_BYTES = 16 << 30
HOSTS_PER_LEAF = 16
LARGER = 10


@dataclass(frozen=True, slots=True)
class Scenario:
    """One planning problem on a standing topology."""

    sources: list[Source]
    targets: list[str]
    flows: list[Flow]
    n: int


def make_topology(rng: random.Random, num_gpus: int, num_hosts: int) -> Topology:
    """Hosts of equal size, NVLink inside, a NIC per GPU; hosts differ in speed."""
    gpus: list[Gpu] = []
    hosts: list[Host] = []
    per_host, more = divmod(num_gpus, num_hosts)
    for h in range(num_hosts):
        name = f"host-{h:05}"
        gbps = rng.choice([100.0, 200.0, 400.0])
        nics = [Nic(f"{name}-nic-{i}", f"leaf-{h // HOSTS_PER_LEAF:03}", gbps) for i in range(per_host + (h < more))]
        gpus += [Gpu(f"{name}-gpu-{i}", name, name, nic, 3600.0) for i, nic in enumerate(nics)]
        hosts.append(Host(name, nics[0]))
    return build_topology(gpus, hosts)


def make_scenario(rng: random.Random, topology: Topology) -> Scenario:
    """Copies on a few serving GPUs and hosts, KV flows between serving GPUs, the rest spare; some or all wanted."""
    by_host: dict[str, list[str]] = {}
    for gpu in topology.gpus.values():
        by_host.setdefault(gpu.host, []).append(gpu.gpu_id)
    hosts = list(by_host)
    serving: list[str] = []
    spare: list[str] = []
    busy_share = rng.uniform(0.05, 0.9)
    for host in hosts:
        mixed = rng.random() < 0.2
        whole = rng.random() < busy_share
        for gpu_id in by_host[host]:
            (serving if (rng.random() < busy_share if mixed else whole) else spare).append(gpu_id)
    copies = rng.sample(serving, min(len(serving), rng.choice([1, 8, 64, 256])))
    sources = [Source(gpu_id) for gpu_id in copies]
    sources += [Source(host, "host") for host in rng.sample(hosts, rng.randint(0, 4))]
    flows = []
    if serving:
        flows = [Flow(rng.choice(serving), rng.choice(serving)) for _ in range(rng.randint(0, len(serving)))]
    return Scenario(sources, spare, flows, rng.randint(1, len(spare)) if rng.random() < 0.5 and spare else len(spare))


def measure(num_gpus: int, num_hosts: int, count: int, seed: int) -> tuple[Summary, float, float]:
    """Milliseconds per plan, milliseconds to build the topology once, and the p99 of CPU milliseconds per plan.

    Planning only computes: where the wall takes much longer than the CPU, the machine was busy with other things.
    """
    rng = random.Random(seed)
    started_s = time.perf_counter()
    topology = make_topology(rng, num_gpus, num_hosts)
    build_ms = (time.perf_counter() - started_s) * 1e3
    scenarios = [make_scenario(rng, topology) for _ in range(count)]
    # What stands is not the planner's garbage: without this, collections walk all scenarios.
    gc.collect()
    gc.freeze()
    times_ms: list[float] = []
    cpu_ms: list[float] = []
    for s in scenarios:
        cpu_started_s = time.process_time()
        started_s = time.perf_counter()
        plan(topology, s.sources, s.targets, s.n, s.flows, MODEL_BYTES)
        times_ms.append((time.perf_counter() - started_s) * 1e3)
        cpu_ms.append((time.process_time() - cpu_started_s) * 1e3)
    gc.unfreeze()
    summary, cpu = Summary.of(times_ms), Summary.of(cpu_ms)
    if summary is None or cpu is None:
        raise typer.BadParameter("no scenarios, nothing measured", param_hint="--scenarios")
    return summary, build_ms, cpu.p99


def command(
    *,
    gpus: Annotated[
        int, typer.Option(min=1, help="GPUs of the smaller cluster; the larger has ten times as many.")
    ] = 1024,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts of the smaller cluster.")] = 128,
    scenarios: Annotated[int, typer.Option(min=1, help="Random scenarios per cluster.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed of the scenarios.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Planning time over random sources, flows and targets, at two sizes."""
    if hosts > gpus:
        raise typer.BadParameter(f"{gpus} GPUs do not fill {hosts} hosts", param_hint="--hosts")
    sizes = ((gpus, hosts), (gpus * LARGER, hosts * LARGER))
    measured = {size: measure(*size, scenarios, seed) for size in sizes}
    small, large = (measured[size][0] for size in sizes)
    # How the median grows, over how n log n would: above 1 it grows faster.
    n_log_n = LARGER * math.log(sizes[1][0]) / math.log(max(2, gpus))
    document: dict[str, Any] = {
        "scenarios": scenarios,
        "seed": seed,
        "p50_ms": {str(size[0]): round(m.p50, 3) for size, (m, _, _) in measured.items()},
        "p99_ms": {str(size[0]): round(m.p99, 3) for size, (m, _, _) in measured.items()},
        "max_ms": {str(size[0]): round(m.max, 3) for size, (m, _, _) in measured.items()},
        "cpu_p99_ms": {str(size[0]): round(cpu, 3) for size, (_, _, cpu) in measured.items()},
        "topology_ms": {str(size[0]): round(build, 3) for size, (_, build, _) in measured.items()},
        "growth": {"p50": round(large.p50 / small.p50, 2), "n_log_n": round(n_log_n, 2)},
    }
    table = Table(
        "GPUs", "hosts", "p50 ms", "p99 ms", "max ms", "CPU p99 ms", "topology ms", title="planning a multicast"
    )
    for size, (m, build, cpu) in measured.items():
        table.add_row(
            str(size[0]), str(size[1]), f"{m.p50:.2f}", f"{m.p99:.2f}", f"{m.max:.2f}", f"{cpu:.2f}", f"{build:.1f}"
        )
    console = Console()
    console.print(table)
    console.print(f"p50 grows {large.p50 / small.p50:.1f} times for ten times the GPUs; n log n: {n_log_n:.1f}")
    write(json_file, document)
