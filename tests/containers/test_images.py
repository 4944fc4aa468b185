"""What is in the images, and what is not."""

from __future__ import annotations

import json

import pytest

from tests.containers.deployment import Deployment
from tests.containers.engine import docker, inspect, say

BUILT = ("gateway", "monitor", "planner", "pool", "worker")
LARGEST_MB = {"gateway": 330, "monitor": 280, "planner": 370, "pool": 365, "worker": 1500}
"""A tenth more than they were, with the base."""
LOOK = """
import json, os, pathlib, shutil, sys
venv = pathlib.Path("/venv")
print(json.dumps({
    "compilers": [each for each in ("cc", "gcc", "g++", "clang", "make", "ld") if shutil.which(each)],
    "pip": [str(each) for each in (*venv.glob("bin/pip*"), *venv.glob("lib/*/site-packages/pip*"))],
    "settings": [each for each in ("/etc/pip.conf", "/etc/xdg/pip/pip.conf", "/root/.config/pip/pip.conf",
        "/root/.pip/pip.conf", "/venv/pip.conf") if os.path.exists(each)],
    "caches": [each for each in ("/root/.cache/pip", "/tmp/pip-build-env") if os.path.exists(each)],
    "variables": sorted(each for each in os.environ if each.startswith("PIP_")),
    "uid": os.getuid(),
    "app": os.listdir("/app"),
    "compiled": bool(list(venv.glob("lib/*/site-packages/services/**/*.pyc"))),
    "torch": bool(list(venv.glob("lib/*/site-packages/torch"))),
    "writable": [str(each) for each in (venv, *venv.iterdir(), *venv.glob("lib/*/site-packages/*"))
        if os.access(each, os.W_OK) and not each.is_symlink()],
}))
"""


def image_of(deployment: Deployment, service: str) -> str:
    (found,) = inspect(deployment.ids[service])
    return str(found["Image"])


@pytest.mark.parametrize("service", BUILT)
def test_an_image_has_no_tools_settings_or_rights_of_its_build(deployment: Deployment, service: str) -> None:
    image = image_of(deployment, service)
    look = docker("run", "--rm", "--network=none", "--entrypoint", "python", image, "-c", LOOK)
    found = json.loads(look)
    assert found == {
        "compilers": [],
        "pip": [],
        "settings": [],
        "caches": [],
        "variables": [],
        "uid": 10001,
        "app": [],
        # A read-only root keeps no byte code: without this, each start would compile everything.
        "compiled": True,
        "torch": service == "worker",
        "writable": [],
    }


@pytest.mark.parametrize("service", BUILT)
def test_no_layer_tells_where_packages_came_from(deployment: Deployment, service: str) -> None:
    image = image_of(deployment, service)
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert not any(word in history.lower() for word in ("pip_", "index", "password", "http://", "https://")), history
    assert inspect(image)[0]["Config"]["User"] == "blitz"


@pytest.mark.parametrize("service", BUILT)
def test_images_are_no_larger_than_they_were(deployment: Deployment, service: str) -> None:
    size_mb = inspect(image_of(deployment, service))[0]["Size"] / 1e6
    say(f"{service}: {size_mb:.0f} MB")
    assert size_mb < LARGEST_MB[service]
