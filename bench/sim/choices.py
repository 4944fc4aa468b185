"""What a command line of the simulator names: systems, a cluster, a trace, a rate; and what cannot be simulated.

Everything that is wrong raises ``BadRequest``, before anything is simulated.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bench.sim.cluster import Cluster, known_cluster, known_clusters, read_cluster
from bench.sim.faults import check_every
from bench.sim.setup import GIB, Setup
from bench.systems import ABLATION, System, check_give_back, named
from bench.traces.reader import read_trace
from bench.traces.request import Trace
from bench.traces.synthetic import synthesise
from shared.errors import BadRequest

HALF = "half"
DEFAULT = ("blitz", "sllm", "allcache", "static-full", "static-half")


def chosen_systems(names: str | None, *, ablation: bool) -> tuple[System, ...]:
    """Those that are named and those of the ablation; if neither is asked for, ``DEFAULT``."""
    if names is None:
        return named(",".join(ABLATION if ablation else DEFAULT))
    return named(names, ablation=ablation)


def chosen_cluster(name: str) -> Cluster:
    """One that is known, or a file."""
    if name in known_clusters():
        return known_cluster(name)
    file = Path(name)
    if file.suffix == ".toml" or os.sep in name:
        try:
            return read_cluster(file)
        except OSError as error:
            raise BadRequest(f"{file} cannot be read: {error.strerror}", param="cluster") from error
    return known_cluster(name)


def chosen_rate(value: str) -> float | None:
    """A factor; None for ``half``."""
    if value == HALF:
        return None
    try:
        return float(value)
    except ValueError:
        raise BadRequest(f"--scale-rate is a number or {HALF!r}, not {value!r}", param="scale-rate") from None


def chosen_trace(trace: Path | None, synthetic: str | None, seed: int, duration_s: float) -> Trace:
    """The file's, or one that is made up."""
    if seed < 0:
        raise BadRequest(f"--seed is at least 0, not {seed}", param="seed")
    if (trace is None) == (synthetic is None):
        raise BadRequest("give a trace file or --synthetic, not both and not neither", param="trace")
    if trace is not None:
        return read_trace(trace)
    assert synthetic is not None
    return synthesise(synthetic, seed=seed, duration_s=duration_s)


def check(setup: Setup, systems: Sequence[System]) -> None:
    """Whether the cluster can hold the systems' instances of the model."""
    if not 0 < setup.compute_scale < float("inf"):
        raise BadRequest(f"--compute is a positive number, not {setup.compute_scale!r}", param="compute")
    check_every(setup.kill_every_s)
    check_give_back(setup.give_back_s)
    cluster, model = setup.cluster, setup.model
    cluster.joined(model.degree)
    weights, memory = model.record.weights_bytes / GIB, model.degree * cluster.gpu_memory_gib
    gpus = "a GPU has" if model.degree == 1 else f"{model.degree} GPUs have"
    if setup.kv_bytes < setup.worker.block_size * model.kv_bytes_per_token:
        raise BadRequest(
            f"{model.name} has {weights:.1f} GiB of weights, and {gpus} {memory:g} GiB in cluster {cluster.name!r}: "
            "there is no room for KV",
            param="model",
        )
    if weights > cluster.host_memory_gib:
        raise BadRequest(
            f"{model.name} has {weights:.1f} GiB of weights, and a host of cluster {cluster.name!r} has "
            f"{cluster.host_memory_gib:g} GiB for copies",
            param="host_memory_gib",
        )
    for system in systems:
        if system.pipelines and setup.kill_every_s is not None:
            raise BadRequest(f"{system.name} is simulated without workers that die: leave one out", param="kill-every")
        if setup.num_workers < system.least_instances:
            raise BadRequest(
                f"{system.name} needs {system.least_instances} instances of {model.degree} GPU"
                f"{'s' if model.degree > 1 else ''}, and cluster {cluster.name!r} has {cluster.num_gpus} GPU"
                f"{'s' if cluster.num_gpus > 1 else ''}",
                param="cluster",
            )
