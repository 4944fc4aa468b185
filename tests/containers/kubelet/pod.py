"""One pod, from its place on a node to its end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.containers.kubelet.docker_api import DockerApi
from tests.containers.kubelet.pod_spec import PodSpec, container_config, quantity
from tests.containers.kubelet.probes import Target, verdicts
from tests.containers.kubelet.volumes import (
    Claim,
    EmptyFolder,
    Projected,
    make_folder,
    mount_memory,
    remove_folder,
    write_projected,
)

LABEL = "kubelet"
_LOOK_S = 0.2
_FIRST_BACK_OFF_S, _MAX_BACK_OFF_S, _FORGET_S = 10.0, 300.0, 600.0
"""As the kubelet has it: the first restart is at once, and a container that ran for long begins again."""


@dataclass
class Host:
    """What all pods share."""

    docker: DockerApi
    network: str
    folder: Path
    names_file: Path
    """A pod's ``/etc/resolv.conf``."""
    pause_image: str
    secrets_lag_s: float
    place: Callable[[Pod], str | None]
    address_for: Callable[[Mapping[str, str]], str]
    """By labels."""
    texts: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    """The keys of Secrets and ConfigMaps, by kind and name."""
    claims: dict[str, Path] = field(default_factory=dict)
    """Folders that are not ours."""
    events: list[str] = field(default_factory=list)

    def claim(self, name: str) -> Path:
        return self.claims.get(name, self.folder / "claims" / name)


class Pod:
    """Its attributes are what the rest of the cluster goes by."""

    def __init__(
        self, name: str, labels: Mapping[str, str], spec: PodSpec, revision: str, host: Host, domain: str = ""
    ) -> None:
        self.name, self.labels, self.spec, self.revision = name, labels, spec, revision
        self.domain = domain
        """Of a StatefulSet's pod: the one in which its name is a host's."""
        self.node: str | None = None
        self.address = ""
        self.restarts: list[str] = []
        """Why, each time."""
        self.container = ""
        """The last one's id."""
        self.ready_since_s: float | None = None
        self.ending = asyncio.Event()
        self._host = host
        self._folder = host.folder / "pods" / f"{name}-{time.monotonic_ns()}"
        self._containers: list[str] = []
        self._refreshes: set[asyncio.Task[None]] = set()
        self.life = asyncio.create_task(self._live())

    @property
    def ready(self) -> bool:
        return self.ready_since_s is not None and not self.ending.is_set()

    @property
    def gone(self) -> bool:
        return self.life.done()

    def available(self, min_ready_s: float) -> bool:
        """Whether it has been ready for that long."""
        return self.ready and self.ready_since_s is not None and time.monotonic() - self.ready_since_s >= min_ready_s

    def uses(self, kind: str, name: str) -> bool:
        return any(isinstance(v, Projected) and (v.kind, v.name) == (kind, name) for v in self.spec.volumes.values())

    def refresh(self, kind: str, name: str) -> None:
        """Its files of a Secret or ConfigMap change after a lag that is this pod's own."""

        async def later() -> None:
            await asyncio.sleep(random.uniform(0.0, self._host.secrets_lag_s))
            self._write(kind, name)

        task = asyncio.create_task(later())
        self._refreshes.add(task)
        task.add_done_callback(self._refreshes.discard)

    async def execute(self, command: list[str]) -> tuple[int, str]:
        return await self._host.docker.execute(self.container, command)

    async def kill(self) -> None:
        """Of the container, by nobody who knows of the pod."""
        await self._host.docker.kill(self.container, "SIGKILL")

    async def log(self) -> str:
        """All its containers'."""
        return "".join([await self._host.docker.logs(each) for each in self._containers[1:]])

    def _say(self, text: str) -> None:
        self._host.events.append(f"{time.strftime('%H:%M:%S')} {self.name}: {text}")

    async def _live(self) -> None:
        try:
            if await self._can_begin():
                self._make_volumes()
                await self._make_sandbox()
                await self._keep_running()
        finally:
            for task in self._refreshes:
                task.cancel()
            await self._remove()

    async def _can_begin(self) -> bool:
        """Wait for a node and for everything that volumes are made of; false: the end came first."""
        waits = ""
        while not self.ending.is_set():
            self.node = self.node or self._host.place(self)
            missing = self._missing() if self.node else "no node"
            if not missing:
                return True
            if missing != waits:
                self._say(f"waits: {missing}")
            waits = missing
            await asyncio.sleep(_LOOK_S)
        return False

    def _missing(self) -> str:
        wanted = [v for v in self.spec.volumes.values() if isinstance(v, Projected) and not v.optional]
        lacks = [f"{v.kind} {v.name}" for v in wanted if not self._has(v)]
        return ", ".join(lacks)

    def _has(self, volume: Projected) -> bool:
        texts = self._host.texts.get((volume.kind, volume.name))
        return texts is not None and all(key in texts for key in volume.items)

    def _make_volumes(self) -> None:
        for name, volume in self.spec.volumes.items():
            folder = self._folder / name
            match volume:
                case EmptyFolder(limit, in_memory=True):
                    mount_memory(folder, quantity(limit), self.spec.group)
                case EmptyFolder():
                    make_folder(folder, self.spec.group)
                case Claim(claimed, read_only=False):
                    make_folder(self._host.claim(claimed), self.spec.group)
                case Projected():
                    folder.mkdir(parents=True)
                    self._write(volume.kind, volume.name)
                case Claim():
                    pass

    def _write(self, kind: str, name: str) -> None:
        for volume_name, volume in self.spec.volumes.items():
            if isinstance(volume, Projected) and (volume.kind, volume.name) == (kind, name) and self._has(volume):
                texts = self._host.texts[kind, name]
                write_projected(self._folder / volume_name, volume, texts, self.spec.group)

    async def _make_sandbox(self) -> None:
        """What has the address and the name for as long as the pod lives: a container that does nothing."""
        self.address = self._host.address_for(self.labels)
        config = {
            "Image": self._host.pause_image,
            "Entrypoint": ["sleep", "2147483647"],
            "User": "65535:65535",
            "Hostname": self.name,
            "Domainname": self.domain,
            "Labels": {LABEL: self.name},
            "HostConfig": {"NetworkMode": self._host.network, "CapDrop": ["ALL"], "ReadonlyRootfs": True},
            "NetworkingConfig": {
                "EndpointsConfig": {self._host.network: {"IPAMConfig": {"IPv4Address": self.address}}}
            },
        }
        name = f"kubelet-{self.name}-{time.monotonic_ns()}"
        self._containers.append(await self._host.docker.create(name, config))
        await self._host.docker.start(self._containers[0])

    async def _keep_running(self) -> None:
        back_off_s = 0.0
        while not self.ending.is_set():
            began_s = time.monotonic()
            why = await self._run_once()
            if self.ending.is_set():
                return
            self.restarts.append(why)
            self._say(f"starts again: {why}")
            if time.monotonic() - began_s > _FORGET_S:
                back_off_s = 0.0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ending.wait(), back_off_s)
            back_off_s = min(max(2 * back_off_s, _FIRST_BACK_OFF_S), _MAX_BACK_OFF_S)

    async def _run_once(self) -> str:
        """One container, to its end; gives why it ended."""
        docker = self._host.docker
        self.container = await docker.create(f"kubelet-{self.name}-{time.monotonic_ns()}", self._config())
        self._containers.append(self.container)
        await docker.start(self.container)
        died = asyncio.create_task(docker.wait(self.container))
        probed = asyncio.create_task(self._probe())
        ending = asyncio.create_task(self.ending.wait())
        try:
            await asyncio.wait({died, probed, ending}, return_when=asyncio.FIRST_COMPLETED)
            why = probed.result() if probed.done() else ""
            if not died.done():
                await self._end_container(died)
            code = await died
            self._say(why or f"exit code {code}")
            return why or f"exit code {code}"
        finally:
            self.ready_since_s = None
            for task in (died, probed, ending):
                task.cancel()

    async def _end_container(self, died: asyncio.Task[int]) -> None:
        """What is to be done before, SIGTERM, and at the end of the grace SIGKILL."""
        docker, container = self._host.docker, self.container
        deadline_s = time.monotonic() + self.spec.grace_s
        if self.spec.before_stop:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.spec.grace_s):
                    await docker.execute(container, self.spec.before_stop)
        await docker.kill(container, "SIGTERM")
        await asyncio.wait({died}, timeout=max(deadline_s - time.monotonic(), 2.0))
        if not died.done():
            self._say(f"is killed after {self.spec.grace_s:g} s of grace")
            await docker.kill(container, "SIGKILL")
            await asyncio.wait({died})

    async def _probe(self) -> str:
        """Gives why the container must end; never, while it is well."""
        target = Target(self.address, self.spec.ports, self.execute)
        if self.spec.startup is not None:
            async for why in verdicts(self.spec.startup, target):
                if why:
                    return f"startup probe: {why}"
                break
        watching = asyncio.create_task(self._watch_readiness(target))
        try:
            if self.spec.liveness is None:
                await asyncio.Event().wait()
            else:
                async for why in verdicts(self.spec.liveness, target):
                    if why:
                        return f"liveness probe: {why}"
            raise AssertionError("a probe ended by itself")
        finally:
            watching.cancel()

    async def _watch_readiness(self, target: Target) -> None:
        if self.spec.readiness is None:
            self.ready_since_s = time.monotonic()
            return
        async for why in verdicts(self.spec.readiness, target):
            if why and self.ready_since_s is not None:
                self._say(f"not ready: {why}")
            self.ready_since_s = None if why else self.ready_since_s or time.monotonic()

    def _config(self) -> dict[str, object]:
        binds = [f"{self._host.names_file}:/etc/resolv.conf:ro"]
        for mount in self.spec.mounts:
            volume = self.spec.volumes[mount.volume]
            source = self._host.claim(volume.name) if isinstance(volume, Claim) else self._folder / mount.volume
            binds.append(f"{source}:{mount.path}{':ro' if mount.read_only else ''}")
        settings = {
            name: {key: value.decode() for key, value in self._host.texts["configMap", name].items()}
            for name in self.spec.settings
        }
        fields = {"metadata.name": self.name, "spec.nodeName": self.node or "", "status.podIP": self.address}
        return container_config(self.spec, self.name, self._containers[0], fields, settings, binds)

    async def _remove(self) -> None:
        if self._containers:
            (self._host.folder / "logs").mkdir(exist_ok=True)
            (self._host.folder / "logs" / f"{self.name}.log").write_text(await self.log())
        for container in reversed(self._containers):
            await self._host.docker.remove(container)
        for name, volume in self.spec.volumes.items():
            if isinstance(volume, EmptyFolder) and (self._folder / name).exists():
                used = sum(file.lstat().st_size for file in (self._folder / name).rglob("*") if file.is_file())
                if used > quantity(volume.limit):
                    self._say(f"would have been evicted: {name} has {used} bytes")
        remove_folder(self._folder)
