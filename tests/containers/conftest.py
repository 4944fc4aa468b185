"""Images are made once per run, and one deployment serves most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.containers.deployment import Deployment, credentials
from tests.containers.engine import NoEngine, engine_version, say
from tests.containers.images import BUILD_TIMEOUT_S, base_image, build_environment, make_external, package_index

PROJECT = "blitzscale-test"


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
def deployment(images: dict[str, str]) -> Iterator[Deployment]:
    """Everything is up, and the demo model is served."""
    made = Deployment(PROJECT, images, credentials("credentials"))
    made.down()
    with package_index():
        made.compose("build", timeout_s=BUILD_TIMEOUT_S)
    try:
        say(f"up and healthy after {made.up():.1f} s")
        made.serve_demo()
        yield made
    finally:
        made.down()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What stops the deployment comes last."""
    last = "test_a_deployment.py"
    items.sort(key=lambda item: item.path.name == last)
