"""The cluster of one YAML, as tests use it: every method may be called from any thread, and waits until it is done."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.compose.kubernetes.manifests import Doc, of_kind
from tests.containers.kubelet.docker_api import DockerApi
from tests.containers.kubelet.fields import UnknownField
from tests.containers.kubelet.names import NameServer
from tests.containers.kubelet.nodes import Nodes, budget
from tests.containers.kubelet.pod import LABEL, Host, Pod
from tests.containers.kubelet.policies import GATEWAY, NAMES_ADDRESS, OUTSIDE_ADDRESS, PODS, Policies
from tests.containers.kubelet.services import VIRTUAL, Service, Services
from tests.containers.kubelet.volumes import remove_folder, texts_of
from tests.containers.kubelet.workloads import Workload, workload

_T = TypeVar("_T")
_NETWORK = "kubelet"
_BRIDGE = "kubelet0"
_BRIDGED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
"""Whether iptables sees what goes from pod to pod."""
_LOOK_S = 0.1
_ENDPOINT_LAG_S = 2.0
_KNOWN = {
    "Namespace", "ServiceAccount", "ConfigMap", "Secret", "Service", "PriorityClass", "PersistentVolumeClaim",
    "Deployment", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy",
}  # fmt: skip


class Cluster:
    """``folder``: of volumes and logs. ``claims``: folders for claims that are filled already, by name."""

    def __init__(
        self,
        docs: Sequence[Doc],
        nodes: Mapping[str, Mapping[str, str]],
        folder: Path,
        pause_image: str,
        claims: Mapping[str, Path],
        secrets_lag_s: float,
    ) -> None:
        for doc in docs:
            if doc["kind"] not in _KNOWN:
                raise UnknownField(f"a {doc['kind']} is not known")
        for left in (folder / "pods").glob("*"):
            remove_folder(left)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._docs = list(docs)
        self._namespace = next(of_kind(self._docs, "Namespace"))["metadata"]["name"]
        self.workloads: dict[str, Workload] = {}
        self.nodes = Nodes(nodes, lambda: self.pods())
        self.policies = Policies(docs, VIRTUAL)
        self.services = Services([Service(doc) for doc in of_kind(self._docs, "Service")], _ENDPOINT_LAG_S)
        self._budgets = [budget(doc) for doc in of_kind(self._docs, "PodDisruptionBudget")]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._failure: BaseException | None = None
        names_file = folder / "resolv.conf"
        names_file.write_text(
            f"nameserver {NAMES_ADDRESS}\nsearch {self._namespace}.svc.cluster.local svc.cluster.local cluster.local\n"
            "options ndots:5\n"
        )
        self._host = Host(
            self._call(_docker_api()), _NETWORK, folder, names_file, pause_image, secrets_lag_s,
            self.nodes.place, self.policies.address_for, claims=dict(claims),
        )  # fmt: skip
        for doc in of_kind(self._docs, "ConfigMap"):
            self._host.texts["configMap", doc["metadata"]["name"]] = texts_of(doc)

    @property
    def events(self) -> list[str]:
        """What has happened to pods, with times."""
        return self._host.events

    def pods(self, *workloads: str) -> list[Pod]:
        """Those that there are, of some workloads or of all."""
        chosen = [each for name, each in list(self.workloads.items()) if not workloads or name in workloads]
        return [pod for each in chosen for pod in list(each.pods)]

    def start(self) -> None:
        """All workloads. Raises ``RuntimeError`` where policies could not be kept to."""
        if not _BRIDGED.exists() or _BRIDGED.read_text().strip() != "1":
            raise RuntimeError(f"{_BRIDGED} is not 1, so no policy is kept to: modprobe br_netfilter, and set it")
        self._call(self._start())

    def close(self) -> None:
        """Everything that was made is gone; volumes, logs and a list of events stay."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def apply_secrets(self, docs: Sequence[Doc]) -> None:
        """Pods that have a Secret mounted see the new one later."""

        async def apply() -> None:
            for doc in docs:
                name, texts = doc["metadata"]["name"], texts_of(doc)
                before = self._host.texts.get(("secret", name))
                self._host.texts["secret", name] = texts
                for pod in self.pods() if before is not None and before != texts else ():
                    if pod.uses("secret", name):
                        pod.refresh("secret", name)

        self._call(apply())

    def rollout(self, name: str, timeout_s: float = 600.0) -> float:
        """Wait until all pods are of the newest template and available; gives the seconds."""
        began_s = time.monotonic()
        self.wait(lambda: self.workloads[name].settled, f"{name} does not get done", timeout_s)
        return time.monotonic() - began_s

    def begin_restart(self, name: str) -> None:
        """As ``kubectl rollout restart``."""
        self._soon(self.workloads[name].restart)

    def restart(self, name: str) -> float:
        """As ``rollout restart`` and ``rollout status``."""
        self.begin_restart(name)
        return self.rollout(name)

    def set_image(self, name: str, image: str) -> float:
        """As ``set image`` and ``rollout status``."""

        def change() -> None:
            self.workloads[name].template["spec"]["containers"][0]["image"] = image

        self._soon(change)
        return self.rollout(name)

    def scale(self, name: str, replicas: int, timeout_s: float = 300.0) -> None:
        """Also until the pods are there, or gone."""
        self._soon(lambda: setattr(self.workloads[name], "replicas", replicas))
        self.wait(lambda: len(self.pods(name)) == replicas, f"{name} does not get {replicas} pods", timeout_s)
        self.rollout(name, timeout_s)

    def execute(self, pod: Pod, *command: str) -> str:
        """What a command writes that must succeed."""
        code, output = self._call(pod.execute(list(command)))
        assert code == 0, f"{pod.name}: {command}: {code} {output}"
        return output

    def kill(self, *pods: Pod) -> None:
        """Their containers, all at once."""

        async def kill() -> None:
            await asyncio.gather(*(pod.kill() for pod in pods))

        self._call(kill())

    def log(self, pod: Pod) -> list[str]:
        return self._call(pod.log()).splitlines()

    def drain(self, node: str, timeout_s: float = 600.0) -> float:
        """As ``kubectl drain``: evict its pods as the budgets allow it, and wait until they are gone."""
        began_s = time.monotonic()
        self.nodes.cordoned.add(node)
        self.wait(lambda: not self._call(self._evict(node)), f"{node} does not get empty", timeout_s, look_s=0.5)
        return time.monotonic() - began_s

    def claim(self, name: str) -> Path:
        """The folder behind it."""
        return self._host.claim(name)

    def set_secrets_lag(self, lag_s: float) -> None:
        self._host.secrets_lag_s = lag_s

    def uncordon(self, node: str) -> None:
        self.nodes.cordoned.discard(node)

    def wait(self, condition: Any, otherwise: str, timeout_s: float, look_s: float = _LOOK_S) -> None:
        """Raises ``AssertionError``, with what the pods do."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if self._failure is not None:
                raise self._failure
            assert time.monotonic() < deadline_s, "\n".join([otherwise, *self.describe(), *self.events[-30:]])
            time.sleep(look_s)

    def describe(self) -> list[str]:
        """A line for each pod."""
        return [
            f"{pod.name} on {pod.node}: {'ready' if pod.ready else 'ending' if pod.ending.is_set() else 'not ready'}, "
            f"{len(pod.restarts)} restarts {pod.restarts}"
            for pod in self.pods()
        ]

    async def _start(self) -> None:
        await self._remove_leftovers()
        await self._host.docker.make_network(_NETWORK, _BRIDGE, PODS, GATEWAY)
        for command in (
            f"ip address replace {OUTSIDE_ADDRESS}/32 dev {_BRIDGE}",
            f"ip address replace {NAMES_ADDRESS}/32 dev {_BRIDGE}",
            # Who asks for a Service from here is not the node to the policies, but somebody outside.
            f"ip route replace {VIRTUAL} dev {_BRIDGE} src {OUTSIDE_ADDRESS}",
            f"sysctl -qw net.ipv4.conf.{_BRIDGE}.send_redirects=0",
        ):
            await asyncio.to_thread(subprocess.run, command.split(), check=True)
        self._names = NameServer(self.services.find)
        await self._names.serve(NAMES_ADDRESS)
        for doc in of_kind(self._docs, "Deployment", "StatefulSet"):
            self.workloads[doc["metadata"]["name"]] = workload(doc, self._host)
        self._stepping = asyncio.create_task(self._keep_stepping())

    async def _keep_stepping(self) -> None:
        try:
            while True:
                for each in self.workloads.values():
                    each.step()
                self.services.look(self.pods())
                await asyncio.sleep(_LOOK_S)
        except Exception as error:
            # For whoever waits for something that will not come.
            self._failure = error
            raise

    async def _evict(self, node: str) -> list[Pod]:
        """Tell those to go that may; gives what is still there."""
        there = [pod for pod in self.pods() if pod.node == node and not pod.gone]
        for pod in there:
            allowed = (each.allows(pod, self.pods(), self._expected(each.covers)) for each in self._budgets)
            if not pod.ending.is_set() and all(allowed):
                pod.ending.set()
        return there

    def _expected(self, covers: Any) -> int:
        return sum(each.replicas for each in self.workloads.values() if covers(each.labels))

    async def _close(self) -> None:
        if self.workloads:
            self._stepping.cancel()
            self._names.close()
        for pod in self.pods():
            pod.life.cancel()
        await asyncio.gather(*(pod.life for pod in self.pods()), return_exceptions=True)
        (self._host.folder / "events.log").write_text("\n".join(self.events) + "\n")
        self.services.close()
        self.policies.close()
        await self._remove_leftovers()
        await self._host.docker.close()

    async def _remove_leftovers(self) -> None:
        for container in await self._host.docker.labelled(LABEL):
            await self._host.docker.remove(container)
        await self._host.docker.remove_network(_NETWORK)

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _soon(self, change: Any) -> None:
        """Between two steps."""

        async def do() -> None:
            change()

        self._call(do())


async def _docker_api() -> DockerApi:
    return DockerApi()
