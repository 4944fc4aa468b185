"""BlitzScale by its rendered YAML in the test cluster, and what tests do with it."""

from __future__ import annotations

import base64
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import yaml
from cryptography import x509
from openai import OpenAI, OpenAIError

from compose.certificates import read_authority
from compose.demo_model import NAME, ensure_demo_model
from compose.secrets_yaml import SECRETS_YAML
from compose.server_conf import TLS_CERT, TLS_KEY
from tests.compose.kubernetes.manifests import Doc, load, of_kind
from tests.containers.deployment import HEALTHY_S, complete
from tests.containers.engine import CACHE, ROOT, run
from tests.containers.images import external_images
from tests.containers.kubelet.cluster import Cluster
from tests.wait_until import eventually_sync

OVERLAY = "many-nodes"
LEAF = "blitzscale.io/leaf"
NODES = {f"{leaf}-{number}": {LEAF: leaf} for leaf in ("leaf-a", "leaf-b") for number in (0, 1)}
WORKERS = ("worker-leaf-a", "worker-leaf-b")
SERVERS = ("nats", "redis")
SERVICES = ("pool", "planner", "monitor", "gateway", *WORKERS)
"""In the order of the page for operators."""
READY_S = 420.0
SECRETS_LAG_S = 60.0
_SMALL = {
    "BLITZ_WORKERS": "1",
    "BLITZ_WORKER_ARENA_MIB": "256",
    "BLITZ_WORKER_KV_MIB": "128",
    "BLITZ_WORKER_HOST_CACHE_MIB": "64",
    "BLITZ_WORKER_THREADS": "1",
}


def for_this_machine(docs: list[Doc], images: Mapping[str, str], **settings: str) -> list[Doc]:
    """All that is changed in the YAML: the images that are built, and workers that fit. ``settings``: of workers."""
    for doc in of_kind(docs, "Deployment", "StatefulSet"):
        (container,) = doc["spec"]["template"]["spec"]["containers"]
        service = container["image"].partition(":")[0].removeprefix("blitzscale-")
        container["image"] = images.get(service, container["image"])
    for doc in of_kind(docs, "ConfigMap"):
        if "BLITZ_WORKERS" in doc["data"]:
            doc["data"] |= _SMALL | settings
    return docs


class KubernetesDeployment:
    """From nothing, without Secrets yet."""

    def __init__(self, images: Mapping[str, str], change: Callable[[list[Doc]], None] = lambda docs: None) -> None:
        folder = CACHE / "kubernetes"
        self.model = ensure_demo_model(folder.with_name("kubernetes-models"))
        self.model.parent.chmod(0o755)
        self.credentials = folder.with_name("kubernetes-credentials")
        docs = for_this_machine(load(OVERLAY), images)
        change(docs)
        shutil.rmtree(self.credentials, ignore_errors=True)
        claims = {"models": self.model.parent}
        self.cluster = Cluster(docs, NODES, folder, external_images()["nats"], claims, SECRETS_LAG_S)
        self.url = f"http://{self.cluster.services.services['gateway'].address}"

    def make_credentials(self, *options: str, sources: Path = ROOT) -> None:
        """The command of the page for operators, of one version or another; then ``kubectl apply``."""
        run("env", f"--chdir={sources}", sys.executable, "-m", "compose", "credentials", self.credentials, *options)
        self.cluster.apply_secrets(self.secrets())

    def secrets(self) -> list[Doc]:
        return list(yaml.safe_load_all((self.credentials / SECRETS_YAML).read_text()))

    def key_of(self, secret: str, key: str) -> str:
        """What a Secret has now."""
        (doc,) = (doc for doc in self.secrets() if doc["metadata"]["name"] == secret)
        return base64.b64decode(doc["data"][key]).decode()

    @property
    def admin_key(self) -> str:
        return self.key_of("operator", "admin-key")

    def wait_ready(self, timeout_s: float = READY_S) -> float:
        """Until all pods are ready; gives the seconds."""
        began_s = time.monotonic()
        self.cluster.wait(
            lambda: all(each.settled for each in self.cluster.workloads.values()), "not all get ready", timeout_s
        )
        return time.monotonic() - began_s

    def command(self, *words: str) -> str:
        """``blitzscale`` from outside of the cluster, through the Service."""
        env = {"BLITZ_URL": self.url, "BLITZ_ADMIN_KEY": self.admin_key}
        ended = run(sys.executable, "-m", "compose", *words, env=env, timeout_s=180.0)
        return ended.stdout + ended.stderr

    def serve_demo(self) -> None:
        """Add the model if it is not there, and wait until it answers."""
        if NAME not in self.command("models", "list"):
            self.command("models", "add", f"/models/{NAME}", "--min-instances", "1")
        self.wait_answers()

    def wait_answers(self, timeout_s: float = HEALTHY_S) -> None:
        eventually_sync(lambda: self._answers(), timeout_s)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(complete(client))
        except OpenAIError:
            return False

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=HEALTHY_S)

    def restarts(self) -> dict[str, list[str]]:
        return {pod.name: list(pod.restarts) for pod in self.cluster.pods() if pod.restarts}

    def redis(self, *command: str) -> str:
        """``redis-cli`` in the pod, as the page for operators has it."""
        (pod,) = self.cluster.pods("redis")
        shell = (
            "REDISCLI_AUTH=$(cat /run/secrets/blitzscale/redis-password) redis-cli --tls "
            f"--cacert /run/secrets/blitzscale/ca.crt -h localhost {' '.join(command)}"
        )
        return self.cluster.execute(pod, "sh", "-c", shell)

    def reload_servers(self) -> None:
        """Have NATS and Redis read their files again."""
        self.reload_nats()
        assert "OK" in self.redis("ACL", "LOAD")

    def reload_nats(self) -> None:
        for pod in self.cluster.pods("nats"):
            self.cluster.execute(pod, "nats-server", "--signal", "reload=/tmp/nats.pid")

    def with_short_certificates(self, valid: timedelta) -> list[Doc]:
        """The Secrets, with certificates of the servers that end soon."""
        authority = read_authority(self.credentials, self.credentials / SECRETS_YAML)
        assert authority is not None
        docs = self.secrets()
        for doc in docs:
            name, data = doc["metadata"]["name"], doc["data"]
            if name in SERVERS:
                now = x509.load_pem_x509_certificate(base64.b64decode(data[TLS_CERT]))
                hosts = now.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
                names = [str(host.value) for host in hosts]
                issued = authority.issue(name, names, valid=valid, also_client=name == "nats")
                data[TLS_CERT] = base64.b64encode(issued.certificate.encode()).decode()
                data[TLS_KEY] = base64.b64encode(issued.key.encode()).decode()
        return docs
