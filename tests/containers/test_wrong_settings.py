"""What is wrong is said in one line, by the container that has it, and it does not count as ready."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.containers.deployment import NUM_WORKERS, Deployment
from tests.containers.engine import CACHE, Compose, docker, inspect, logs, say
from tests.wait_until import eventually_sync

REFUSED_S = 240.0
"""Passwords in files are tried for 90 s: others may still arrive."""


@contextmanager
def other_settings(deployment: Deployment, env: Mapping[str, str]) -> Iterator[Compose]:
    """What is started meanwhile has them."""
    compose = deployment.compose
    usual = dict(compose.env)
    compose.env.update(env)
    try:
        yield compose
    finally:
        compose.env.clear()
        compose.env.update(usual)


def refused(deployment: Deployment, service: str, **env: str) -> tuple[int, list[str]]:
    """Exit code and lines of a container that is started beside the deployment's, with other settings."""
    with other_settings(deployment, env) as compose:
        ended = compose("run", "--rm", "-T", "--no-deps", service, timeout_s=REFUSED_S, fails=True)
    lines = (ended.stdout + ended.stderr).splitlines()
    # Compose says what it makes, and the old one its exit code at the end.
    return ended.returncode, [
        line for line in lines if not re.fullmatch(r"Creating .*| *(Container|Network) .*|\s*|\d+", line)
    ]


def with_secret(name: str, text: str) -> str:
    """A copy of the credentials in which one is another."""
    folder = CACHE / "wrong-credentials"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(CACHE / "credentials", folder)
    (folder / name).chmod(0o644)
    (folder / name).write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("service", "secret", "text", "said"),
    [
        ("planner", "nats-planner.password", "", "BLITZ_NATS_PASSWORD_FILE"),
        ("pool", "redis.password", "", "BLITZ_REDIS_PASSWORD_FILE"),
        ("monitor", "nats-monitor.password", "wrong\n", "refuses user 'monitor' with this password"),
        ("pool", "redis.password", "wrong\n", "Redis refuses the password"),
    ],
)
def test_a_wrong_secret_is_refused_in_one_line(
    deployment: Deployment, service: str, secret: str, text: str, said: str
) -> None:
    code, lines = refused(deployment, service, BLITZ_CREDENTIALS=with_secret(secret, text))
    assert code == 1
    assert said in lines[-1]
    # It says at once what it waits for. A server that refuses may cut a connection off before it has said why.
    waits = re.compile(rf"waiting for NATS: (\[Errno|the server {re.escape(said)})")
    assert [line for line in lines[:-1] if not waits.search(line)] == []


def test_each_worker_says_what_is_wrong_and_the_container_is_not_healthy(deployment: Deployment) -> None:
    """They are given up only after five starts of 90 s; ``tests/stack`` sees that, with another fault."""
    env = {"BLITZ_CREDENTIALS": with_secret("nats-worker.password", "wrong\n"), "BLITZ_WORKER_HOST": "another"}
    with other_settings(deployment, env) as compose:
        container = compose("run", "-d", "--no-deps", "worker").stdout.split()[-1]
    try:
        said = "refuses user 'worker' with this password"
        eventually_sync(lambda: sum(said in line for line in logs(container)) >= NUM_WORKERS)
        assert inspect(container)[0]["State"]["Health"]["Status"] != "healthy"
    finally:
        docker("rm", "--force", container)


def test_little_shared_memory_is_refused_with_the_numbers(deployment: Deployment) -> None:
    code, lines = refused(deployment, "worker", BLITZ_SHM_SIZE="64m")
    assert code == 1
    assert lines == [
        "workers: /dev/shm has 64 MiB, and BLITZ_WORKERS=2 need 128 MiB at least: raise the container's shm_size, "
        "or mount more memory there"
    ]


def test_a_second_container_of_one_host_name_is_refused(deployment: Deployment) -> None:
    code, lines = refused(deployment, "worker")
    say(f"{len(lines)} lines")
    assert code == 1
    assert any("is held by process" in line for line in lines), lines
    deployment.wait_healthy()
