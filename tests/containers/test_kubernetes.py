"""The rendered YAML as pods: it comes up from nothing, and streams do not notice what is done to it.

In this order: the first test starts everything, and the last ones take away what the others use.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest

from compose.demo_model import NAME
from tests.compose.kubernetes.flows import Flow
from tests.containers.deployment import complete, undisturbed_streams
from tests.containers.engine import CACHE, ROOT, run, say
from tests.containers.images import with_sources
from tests.containers.kubelet.pod import Pod
from tests.containers.kubernetes import SERVERS, SERVICES, WORKERS, KubernetesDeployment
from tests.wait_until import eventually_sync

LATE_S = 60.0
WHOLE_AGAIN_S = 60.0
ROTATION_LAG_S = 10.0
"""Of Secrets, while passwords are replaced: a sixth of what it is otherwise, and so are the waits of the procedure."""
CERTIFICATES_LAST = [timedelta(seconds=seconds) for seconds in (90, 180, 360)]
ALL = (*SERVERS, "jaeger", *SERVICES)


def test_it_comes_up_from_nothing_with_secrets_that_are_late(kubernetes: KubernetesDeployment) -> None:
    cluster = kubernetes.cluster
    cluster.start()
    time.sleep(LATE_S)
    assert {pod.name for pod in cluster.pods() if pod.container} == {pod.name for pod in cluster.pods("jaeger")}
    kubernetes.make_credentials("--kubernetes")
    say(f"all pods ready {kubernetes.wait_ready():.1f} s after the Secrets")
    kubernetes.serve_demo()
    with kubernetes.client() as client:
        assert complete(client)
    assert kubernetes.restarts() == {}


@pytest.mark.parametrize("workload", [each for each in ALL if each != "gateway"])
def test_streams_survive_each_killed_container(kubernetes: KubernetesDeployment, workload: str) -> None:
    with undisturbed_streams(kubernetes):
        for pod in kubernetes.cluster.pods(workload):
            kill_and_wait(kubernetes, pod)
        kubernetes.cluster.rollout(workload)


def kill_and_wait(kubernetes: KubernetesDeployment, pod: Pod) -> None:
    """Until it is ready again."""
    before = len(pod.restarts)
    kubernetes.cluster.kill(pod)
    eventually_sync(lambda: len(pod.restarts) > before and pod.ready)


@pytest.mark.parametrize("workload", ALL)
def test_streams_survive_a_restarted_rollout(kubernetes: KubernetesDeployment, workload: str) -> None:
    before = {pod.name for pod in kubernetes.cluster.pods(workload)} if workload not in SERVERS else set()
    with undisturbed_streams(kubernetes):
        say(f"{workload}: {kubernetes.cluster.restart(workload):.0f} s")
        eventually_sync(lambda: not any(pod.ending.is_set() for pod in kubernetes.cluster.pods(workload)))
    assert not before & {pod.name for pod in kubernetes.cluster.pods(workload)}


def test_all_containers_killed_at_once_start_again(kubernetes: KubernetesDeployment) -> None:
    kubernetes.wait_ready()
    pods = kubernetes.cluster.pods()
    began_s = time.monotonic()
    kubernetes.cluster.kill(*pods)
    eventually_sync(lambda: all(pod.restarts for pod in pods))
    kubernetes.wait_answers()
    whole_s = time.monotonic() - began_s
    say(f"answers after {whole_s:.1f} s, all ready {kubernetes.wait_ready():.1f} s later")
    assert whole_s < WHOLE_AGAIN_S


@pytest.mark.parametrize("node", ["leaf-a-0", "leaf-b-1"])
def test_streams_survive_a_drained_node(kubernetes: KubernetesDeployment, node: str) -> None:
    with undisturbed_streams(kubernetes):
        say(f"{node}: empty after {kubernetes.cluster.drain(node):.0f} s")
        kubernetes.cluster.uncordon(node)
        say(f"whole again after {kubernetes.wait_ready():.0f} s")


def test_streams_survive_replaced_passwords(kubernetes: KubernetesDeployment) -> None:
    """As the page for operators has it."""
    kubernetes.cluster.set_secrets_lag(ROTATION_LAG_S)
    before, restarts = kubernetes.admin_key, kubernetes.restarts()
    old = kubernetes.key_of("redis", "redis-password")
    with undisturbed_streams(kubernetes):
        for number, step in enumerate(("add", "switch", "retire")):
            kubernetes.make_credentials("--rotate", step)
            time.sleep(2 * ROTATION_LAG_S)
            if step != "switch":
                kubernetes.reload_servers()
                for pod in kubernetes.cluster.pods("nats"):
                    told = [line for line in kubernetes.cluster.log(pod) if "Reloaded server configuration" in line]
                    assert len(told) == (1 if number == 0 else 2), pod.name
    assert kubernetes.admin_key != before
    assert "WRONGPASS" in kubernetes.redis("AUTH", old)
    assert NAME in kubernetes.command("models", "list")
    assert kubernetes.restarts() == restarts
    # Nobody goes on with an old password: whoever starts again connects with the new one.
    for workload in SERVICES:
        kubernetes.cluster.restart(workload)
    kubernetes.wait_answers()


def test_streams_survive_another_version_and_the_way_back(
    kubernetes: KubernetesDeployment, service_images: dict[str, str]
) -> None:
    sources = later_version(CACHE / "later")
    later = {service: with_sources(image, sources, "later") for service, image in service_images.items()}
    cluster = kubernetes.cluster
    before = earlier_version(CACHE / "earlier")
    earlier = {service: with_sources(image, before, "earlier") for service, image in service_images.items()}
    with undisturbed_streams(kubernetes):
        roll(kubernetes, earlier)
        roll(kubernetes, service_images)
        kubernetes.make_credentials(sources=sources)
        time.sleep(2 * ROTATION_LAG_S)
        for server in ("nats", "redis"):
            cluster.restart(server)
        for images in (later, service_images):
            roll(kubernetes, images)


def roll(kubernetes: KubernetesDeployment, images: dict[str, str]) -> None:
    """One service after the other, in the order of the page for operators."""
    for workload in SERVICES:
        image = images["worker" if workload in WORKERS else workload]
        say(f"{workload}, {image}: {kubernetes.cluster.set_image(workload, image):.0f} s")


def earlier_version(folder: Path) -> Path:
    """The sources before the newest change to what processes say to each other."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    said = ("shared/messages", "shared/subjects.py", "shared/permissions.py")
    newest = run("git", "log", "-1", "--format=%H", "--", *said).stdout.strip()
    archive = folder / "sources.tar"
    run("git", "archive", "--output", archive, f"{newest}^", "compose", "services", "shared")
    run("tar", "-C", folder, "-xf", archive)
    return folder


def later_version(folder: Path) -> Path:
    """Of the sources: every message has one more field that may be missing, and there is one more subject."""
    shutil.rmtree(folder, ignore_errors=True)
    for package in ("compose", "services", "shared"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    message, load = 'tag_field="kind"):\n', "    _row(subjects.load,"
    for file, old, new in (
        ("messages/codec.py", message, f'{message}    later: str = "x"\n'),
        ("subjects.py", "def departures()", 'def later() -> str:\n    return f"{PREFIX}.later"\n\n\ndef departures()'),
        ("permissions.py", load, f'    _row(subjects.later, _WORKER, ("monitor",)),\n{load}'),
    ):
        path = folder / "shared" / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    return folder


def test_streams_survive_certificates_that_end(kubernetes: KubernetesDeployment) -> None:
    """Who is connected stays so. Who connects anew says why it cannot, until the certificates are replaced."""
    cluster = kubernetes.cluster
    cluster.set_secrets_lag(0.0)
    with undisturbed_streams(kubernetes):
        for lasts in CERTIFICATES_LAST:  # until the servers are done before it ends
            cluster.apply_secrets(kubernetes.with_short_certificates(lasts))
            ends_s = time.monotonic() + lasts.total_seconds()
            kubernetes.reload_nats()
            cluster.restart("redis")
            if time.monotonic() < ends_s:
                break
        time.sleep(max(0.0, ends_s - time.monotonic()) + 1)
        monitor, pool = cluster.pods("monitor")[0], cluster.pods("pool")[0]
        cluster.kill(monitor, pool)
        for pod in (monitor, pool):
            eventually_sync(lambda pod=pod: any("certificate has expired" in line for line in cluster.log(pod)))
            assert not pod.ready
        kubernetes.make_credentials()
        kubernetes.reload_nats()
        cluster.restart("redis")
        eventually_sync(lambda: monitor.ready and pool.ready)
    kubernetes.wait_ready()


def test_a_missing_secret_key_is_said_in_one_line_and_never_ready(kubernetes: KubernetesDeployment) -> None:
    """The old pods serve on meanwhile."""
    cluster = kubernetes.cluster
    kubernetes.wait_ready()
    old = set(cluster.pods("monitor"))
    whole = kubernetes.secrets()
    lacking = kubernetes.secrets()
    (monitor,) = (doc for doc in lacking if doc["metadata"]["name"] == "monitor")
    del monitor["data"]["nats-password"]
    cluster.set_secrets_lag(1e6)
    cluster.apply_secrets(lacking)
    with undisturbed_streams(kubernetes):
        new = begin_rollout(kubernetes, "monitor")
        eventually_sync(lambda: len(new.restarts) > 1)
        assert not new.ready
        lines = set(cluster.log(new))
        assert len(lines) == 1, lines
        assert "nats-password" in lines.pop()
        assert all(pod.ready for pod in old)
    cluster.set_secrets_lag(0.0)
    cluster.apply_secrets(whole)
    cluster.rollout("monitor")


def test_little_shared_memory_is_said_in_one_line_and_never_ready(kubernetes: KubernetesDeployment) -> None:
    cluster = kubernetes.cluster
    (volume,) = (v for v in cluster.workloads[WORKERS[1]].template["spec"]["volumes"] if v["name"] == "shm")
    env = cluster.workloads[WORKERS[1]].template["spec"]["containers"][0]["env"]
    whole = volume["emptyDir"]["sizeLimit"]
    volume["emptyDir"]["sizeLimit"] = "64Mi"
    env.append({"name": "BLITZ_WORKERS", "value": "2"})
    with undisturbed_streams(kubernetes):
        new = begin_rollout(kubernetes, WORKERS[1])
        eventually_sync(lambda: len(new.restarts) > 1)
        assert not new.ready
        (line,) = set(cluster.log(new))
        assert "/dev/shm has 64 MiB" in line
        volume["emptyDir"]["sizeLimit"] = whole
        env.pop()
        cluster.restart(WORKERS[1])


def test_closed_ports_between_workers_are_said_in_one_line(kubernetes: KubernetesDeployment) -> None:
    """What comes then comes from the checkpoint."""
    cluster = kubernetes.cluster
    kubernetes.wait_ready()
    before = serving(kubernetes)

    def said() -> list[str]:
        return [line for pod in cluster.pods(*WORKERS) for line in cluster.log(pod) if "are missing after" in line]

    said_before = said()
    with undisturbed_streams(kubernetes):
        with cluster.policies.dropped("worker", "worker"):
            kubernetes.command("models", "set", NAME, "--min-instances", str(before + 1))
            eventually_sync(lambda: serving(kubernetes) > before)
            lines = [line for line in said() if line not in said_before]
            say("\n".join(lines))
            assert len(lines) == 1
        kubernetes.command("models", "set", NAME, "--min-instances", "1")


def serving(kubernetes: KubernetesDeployment) -> int:
    """Instances that serve."""
    found = json.loads(kubernetes.command("status", "--json"))
    return sum(each["state"] == "serving" for each in found["instances"])


def begin_rollout(kubernetes: KubernetesDeployment, workload: str) -> Pod:
    """Gives the first pod of the new template, when it has begun to run."""
    old = set(kubernetes.cluster.pods(workload))
    kubernetes.cluster.begin_restart(workload)
    found: list[Pod] = []

    def new() -> bool:
        found[:] = [pod for pod in kubernetes.cluster.pods(workload) if pod not in old and pod.container]
        return bool(found)

    eventually_sync(new)
    return found[0]


def test_redis_without_its_volume_and_with_a_backup(kubernetes: KubernetesDeployment) -> None:
    cluster = kubernetes.cluster
    kubernetes.wait_ready()
    cordoned = f"{cluster.pods(WORKERS[0])[0].name}-0"
    kubernetes.command("models", "set", NAME, "--min-instances", "2")
    kubernetes.command("workers", "drain", cordoned)
    eventually_sync(lambda: state(kubernetes)[1] >= 2)
    before = state(kubernetes)
    assert cordoned in before[2]
    (redis,) = cluster.pods("redis")
    data = cluster.claim("data-redis-0")
    kubernetes.redis("CONFIG", "SET", "auto-aof-rewrite-percentage", "0")
    eventually_sync(lambda: "aof_rewrite_in_progress:0" in kubernetes.redis("INFO", "persistence"))
    backup = CACHE / "registry.tar"
    inside = ["docker", "exec", redis.container]
    subprocess.run([*inside, "cp", "-R", "/data/appendonlydir", "/data/backup"], check=True)
    with backup.open("wb") as file:
        subprocess.run([*inside, "tar", "-C", "/data/backup", "-cf", "-", "."], stdout=file, check=True)
    subprocess.run([*inside, "rm", "-r", "/data/backup"], check=True)
    kubernetes.redis("CONFIG", "SET", "auto-aof-rewrite-percentage", "100")
    with undisturbed_streams(kubernetes):
        cluster.scale("redis", 0)
        shutil.rmtree(data / "appendonlydir")
        cluster.scale("redis", 1)
        # Workers register again what they hold.
        eventually_sync(lambda: NAME in kubernetes.command("models", "list"))
        cluster.scale("pool", 0)
        cluster.scale("redis", 0)
        shutil.rmtree(data / "appendonlydir")
        (data / "appendonlydir").mkdir()
        subprocess.run(["tar", "-C", data / "appendonlydir", "--same-owner", "-xf", backup], check=True)
        cluster.scale("redis", 1)
        cluster.scale("pool", 2)
        eventually_sync(lambda: state(kubernetes) == before)
    kubernetes.command("workers", "undrain", cordoned)
    kubernetes.command("models", "set", NAME, "--min-instances", "1")


def state(kubernetes: KubernetesDeployment) -> tuple[list[str], int, list[str]]:
    """Models with their floors, the number of instances, and the workers that are cordoned."""
    found = json.loads(kubernetes.command("status", "--json"))
    models = [f"{each['name']} {each.get('min_instances')}" for each in found["models"]]
    return models, len(found["instances"]), [str(each["id"]) for each in found["workers"] if each.get("drain")]


def test_what_serves_goes_on_when_all_nats_volumes_are_lost(kubernetes: KubernetesDeployment) -> None:
    cluster = kubernetes.cluster
    before = instances(kubernetes)
    restarts = kubernetes.restarts()
    cluster.scale("nats", 0)
    for number in range(3):
        shutil.rmtree(cluster.claim(f"data-nats-{number}"))
    began_s = time.monotonic()
    cluster.scale("nats", 3)
    kubernetes.wait_answers()
    say(f"answers {time.monotonic() - began_s:.1f} s after the NATS servers are told to start")
    kubernetes.wait_ready()
    assert instances(kubernetes) == before
    assert kubernetes.restarts() == restarts


def instances(kubernetes: KubernetesDeployment) -> set[str]:
    return {each["id"] for each in json.loads(kubernetes.command("status", "--json"))["instances"]}


def test_no_pod_was_killed_at_the_end_of_its_grace_or_filled_its_disk(kubernetes: KubernetesDeployment) -> None:
    events = kubernetes.cluster.events
    assert [event for event in events if "of grace" in event or "evicted" in event] == []


NOT_USED: dict[Flow, str] = {}
"""What is allowed and was not used in these tests, and why."""


def test_connections_were_those_that_are_allowed(kubernetes: KubernetesDeployment) -> None:
    policies = kubernetes.cluster.policies
    assert policies.rejected() == {}
    used = {flow for flow, packets in policies.used().items() if packets}
    say(f"{len(used)} of {len(policies.allowed)} allowed flows were used")
    assert policies.allowed - used == NOT_USED.keys()
    # They are not only counted: what nobody needs is refused.
    (pod, *_), (redis,) = kubernetes.cluster.pods("monitor"), kubernetes.cluster.pods("redis")
    connect = f"import socket; socket.create_connection(({redis.address!r}, 6379), 5)"
    with pytest.raises(AssertionError, match="ConnectionRefusedError"):
        kubernetes.cluster.execute(pod, "python", "-c", connect)
    assert policies.rejected().keys() == {"monitor:redis"}
