"""Images are made once per run. One deployment serves most tests of docker-compose, and one those of Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.containers.deployment import Deployment, credentials
from tests.containers.engine import NoEngine, engine_version, say
from tests.containers.images import BUILD_TIMEOUT_S, base_image, build_environment, make_external, package_index
from tests.containers.kubernetes import KubernetesDeployment

PROJECT = "blitzscale-test"
ORDER = {"test_kubernetes.py": -1, "test_a_deployment.py": 1}
"""The two deployments are never there together: Kubernetes' is gone after its file. What stops the other comes last."""


@pytest.fixture(scope="session")
def images() -> dict[str, str]:
    """What the deployment's builds take from the environment; the base and the servers' images are there."""
    try:
        engine_version()
    except NoEngine as error:
        pytest.exit(str(error), returncode=1)
    base = base_image()
    stood_in = make_external(base)
    say(f"base: {base}; stood in for: {', '.join(stood_in) or 'nothing'}")
    return build_environment(base)


@pytest.fixture(scope="session")
def built(images: dict[str, str]) -> Deployment:
    """The images are there, and nothing runs."""
    made = Deployment(PROJECT, images, credentials("credentials"))
    made.down()
    with package_index():
        made.compose("build", timeout_s=BUILD_TIMEOUT_S)
    return made


@pytest.fixture(scope="session")
def deployment(built: Deployment) -> Iterator[Deployment]:
    """Everything is up, and the demo model is served."""
    try:
        say(f"up and healthy after {built.up():.1f} s")
        built.serve_demo()
        yield built
    finally:
        built.down()


@pytest.fixture(scope="session")
def service_images(built: Deployment) -> dict[str, str]:
    """By service."""
    return {service: f"{PROJECT}-{service}:here" for service in ("gateway", "monitor", "planner", "pool", "worker")}


@pytest.fixture(scope="module")
def kubernetes(service_images: dict[str, str]) -> Iterator[KubernetesDeployment]:
    """The cluster, empty: the first test fills it."""
    if os.geteuid() != 0:
        pytest.skip("pods need root: for iptables, addresses and mounts")
    made = KubernetesDeployment(service_images)
    try:
        yield made
    finally:
        made.cluster.close()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.get(item.path.name, 0))
