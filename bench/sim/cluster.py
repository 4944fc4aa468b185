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
    oversubscription = 1.0     # NICs below a leaf to its uplinks, as Gbit/s; 1: uplinks never bind

Every key but ``scale_up_gbps`` and ``oversubscription`` must be there, and no other may. All bandwidths are what a
transfer gets, in Gbit/s of payload.
"""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path

import msgspec

from shared.errors import BadTopology


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

    def __post_init__(self) -> None:
        for key in ("hosts", "gpus_per_host", "gpus_per_domain", "nics_per_host", "ssds_per_host", "hosts_per_leaf"):
            if getattr(self, key) < 1:
                raise self._wrong(f"{key} is {getattr(self, key)}: at least 1", key)
        for key in ("nic_gbps", "host_link_gbps", "ssd_gbps", "scale_up_gbps"):
            gbps = getattr(self, key)
            if gbps is not None and not 0 < gbps < math.inf:
                raise self._wrong(f"{key} is {gbps!r}: not a positive bandwidth", key)
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
