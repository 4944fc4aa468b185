"""A cluster on paper: one TOML file (``clusters/`` has those of Table 1 of the paper, a large one, and the lab).

    name = "a"
    hosts = 4                  # all alike
    gpus_per_host = 8
    gpus_per_domain = 8        # GPUs of one host that NVLink, or a PCIe switch, joins; 1: none
    scale_up_gbps = 1600.0     # of a GPU into its domain, each direction; only with a domain
    nics_per_host = 8          # GPUs share them evenly, in order; the first one also serves the host's memory
    nic_gbps = 100.0           # each direction
    host_link_gbps = 128.0     # of a GPU to its host's memory, each direction
    ssds_per_host = 8          # GPUs share them evenly, in order
    ssd_gbps = 10.0            # reading
    hosts_per_leaf = 4         # the last leaf may have fewer
    gpu = "a100"               # whose profile computes (``profiles/``); where none is said, a100
    gpu_memory_gib = 80.0      # of a GPU; where none is said, 80
    host_memory_gib = 1024.0   # of a host, for copies of models; where none is said, 1024
    oversubscription = 1.0     # NICs below a leaf to its uplinks, as Gbit/s; 1: uplinks never bind

Every key but ``scale_up_gbps``, ``oversubscription``, ``gpu`` and the memories must be there, and no other may. All
bandwidths are what a transfer gets, in Gbit/s of payload.
"""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path

import msgspec

from shared.errors import BadTopology

MAX_GPUS = 1_000_000
"""Each is a worker, with links, in memory."""
MAX_MEMORY_GIB = 1e9


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a cluster file says; see this module's docstring. Raises ``BadTopology`` for what contradicts itself."""

    name: str
    hosts: int
    gpus_per_host: int
    gpus_per_domain: int
    nics_per_host: int
    nic_gbps: float
    host_link_gbps: float
    ssds_per_host: int
    ssd_gbps: float
    hosts_per_leaf: int
    scale_up_gbps: float | None = None
    oversubscription: float = 1.0
    gpu: str = "a100"
    gpu_memory_gib: float = 80.0
    host_memory_gib: float = 1024.0

    def __post_init__(self) -> None:
        for key in ("hosts", "gpus_per_host", "gpus_per_domain", "nics_per_host", "ssds_per_host", "hosts_per_leaf"):
            if getattr(self, key) < 1:
                raise self._wrong(f"{key} is {getattr(self, key)}: at least 1", key)
        if self.num_gpus > MAX_GPUS:
            raise self._wrong(f"{self.num_gpus:,} GPUs: at most {MAX_GPUS:,} are simulated", "hosts")
        for key in ("nic_gbps", "host_link_gbps", "ssd_gbps", "scale_up_gbps"):
            gbps = getattr(self, key)
            if gbps is not None and not 0 < gbps < math.inf:
                raise self._wrong(f"{key} is {gbps!r}: not a positive bandwidth", key)
        for key in ("gpu_memory_gib", "host_memory_gib"):
            if not 0 < getattr(self, key) <= MAX_MEMORY_GIB:
                raise self._wrong(f"{key} is {getattr(self, key)!r}: no size of a memory", key)
        for key in ("gpus_per_domain", "nics_per_host", "ssds_per_host"):
            if self.gpus_per_host % getattr(self, key):
                raise self._wrong(
                    f"{self.gpus_per_host} GPUs of a host cannot be shared out evenly: {key} is {getattr(self, key)}",
                    key,
                )
        if (self.gpus_per_domain > 1) != (self.scale_up_gbps is not None):
            said = "no scale_up_gbps" if self.scale_up_gbps is None else f"a scale_up_gbps of {self.scale_up_gbps:g}"
            raise self._wrong(f"gpus_per_domain is {self.gpus_per_domain}, and there is {said}", "scale_up_gbps")
        if self.hosts_per_leaf > self.hosts:
            raise self._wrong(f"a leaf of {self.hosts_per_leaf} hosts, but {self.hosts} in all", "hosts_per_leaf")
        if not 1 <= self.oversubscription < math.inf:
            raise self._wrong(f"oversubscription is {self.oversubscription!r}: at least 1", "oversubscription")
        if self.oversubscription > 1 and self.num_leaves == 1:
            raise self._wrong(
                f"oversubscription is {self.oversubscription:g}, but one leaf has all hosts", "oversubscription"
            )

    def _wrong(self, what: str, param: str) -> BadTopology:
        return BadTopology(f"cluster {self.name!r}: {what}", param=param)

    def joined(self, degree: int) -> Cluster:
        """The same with ``degree`` GPUs of a host as one, and with all their links: what tensor-parallel instances run
        on. Raises ``BadTopology`` where GPUs of a domain, NICs or SSDs cannot be put together so."""
        if degree == 1:
            return self
        if self.gpus_per_domain % degree:
            raise self._wrong(f"{self.gpus_per_domain} GPUs of a domain are not joined {degree} at a time", "degree")
        domain = self.gpus_per_domain // degree

        def put_together(key: str, count: int) -> tuple[int, float]:
            """How many are left, and how much wider each is. Where there are no more than workers, all stay."""
            workers = self.gpus_per_host // degree
            if count <= workers:
                return count, 1.0
            if count % workers:
                raise self._wrong(f"{key} is {count}, for {workers} times {degree} GPUs of a host", "degree")
            return workers, count / workers

        nics, wider = put_together("nics_per_host", self.nics_per_host)
        ssds, faster = put_together("ssds_per_host", self.ssds_per_host)
        return msgspec.structs.replace(
            self,
            name=f"{self.name}-by-{degree}",
            gpus_per_host=self.gpus_per_host // degree,
            gpus_per_domain=domain,
            scale_up_gbps=self.scale_up_gbps * degree if self.scale_up_gbps is not None and domain > 1 else None,
            nics_per_host=nics,
            nic_gbps=self.nic_gbps * wider,
            host_link_gbps=self.host_link_gbps * degree,
            ssds_per_host=ssds,
            ssd_gbps=self.ssd_gbps * faster,
        )

    @property
    def num_gpus(self) -> int:
        return self.hosts * self.gpus_per_host

    @property
    def num_leaves(self) -> int:
        return math.ceil(self.hosts / self.hosts_per_leaf)

    @property
    def uplink_gbps(self) -> float:
        """Of a leaf, each direction, all its uplinks together."""
        return self.hosts_per_leaf * self.nics_per_host * self.nic_gbps / self.oversubscription


def read_cluster(file: Path) -> Cluster:
    """Raises ``BadTopology``, with the file and the key, for what is no cluster; ``OSError``."""
    return _decode(file.read_bytes(), str(file))


def known_clusters() -> tuple[str, ...]:
    """Names for ``known_cluster``, sorted."""
    files = resources.files("bench.sim").joinpath("clusters").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def known_cluster(name: str) -> Cluster:
    """One of those that come with the simulator. Raises ``BadTopology`` for another name."""
    if name not in known_clusters():
        raise BadTopology(f"no cluster {name!r}: there are {', '.join(known_clusters())}", param="cluster")
    return _decode(resources.files("bench.sim").joinpath("clusters", f"{name}.toml").read_bytes(), name)


def _decode(text: bytes, where: str) -> Cluster:
    try:
        return msgspec.toml.decode(text, type=Cluster)
    except BadTopology as error:
        raise BadTopology(f"{where}: {error.message}", param=error.param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise BadTopology(f"{where}: {error}", param="cluster") from error
