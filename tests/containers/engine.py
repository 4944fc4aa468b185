"""The Docker engine and docker-compose, as their commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "containers"
"""What one run makes and the next one uses: packages for the images, and the models and passwords of the stack."""
OVERRIDE = Path(__file__).with_name("override.yml")


class NoEngine(Exception):
    """There is nothing to run containers with."""


def say(text: object) -> None:
    """For whoever reads the run: a size, a time."""
    sys.stdout.write(f"{text}\n")


def run(
    *command: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 120.0, fails: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's root. What it wrote comes with the error, unless it may fail."""
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        # docker-compose is written in Python, and its package has the name of ours.
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if ended.returncode and not fails:
        raise AssertionError(f"{' '.join(map(str, command))}: {ended.returncode}\n{ended.stdout}{ended.stderr}")
    return ended


def docker(*command: str | Path, timeout_s: float = 120.0, fails: bool = False) -> str:
    """What a command of Docker's writes."""
    ended = run("docker", *command, timeout_s=timeout_s, fails=fails)
    return ended.stdout if not fails else ended.stdout + ended.stderr


def engine_version() -> str:
    """Raises ``NoEngine``, in one line."""
    if not shutil.which("docker"):
        raise NoEngine("there is no docker command")
    asked = run("docker", "version", "--format", "{{.Server.Version}}", fails=True)
    if asked.returncode:
        raise NoEngine(f"no Docker engine answers: {asked.stderr.strip().splitlines()[-1]}")
    return asked.stdout.strip()


def compose_command() -> list[str]:
    """Compose 2, or the old command. Raises ``NoEngine``."""
    if run("docker", "compose", "version", fails=True).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise NoEngine("there is neither docker compose nor docker-compose")


class Compose:
    """The deployment's file, with the override of the tests, as one project with variables of its own."""

    def __init__(self, project: str, env: Mapping[str, str], *overrides: Path) -> None:
        self.project = project
        self.env = dict(env)
        command = compose_command()
        file = ROOT / "compose" / "docker-compose.yml"
        if command == ["docker-compose"]:
            file = _without_name(file)
            # It would ask Docker's command for BuildKit, which may lack it.
            self.env["COMPOSE_DOCKER_CLI_BUILD"] = "0"
        files = [part for each in (file, OVERRIDE, *overrides) for part in ("-f", str(each))]
        self._command = [*command, "-p", project, "--project-directory", str(ROOT / "compose"), *files]

    def __call__(
        self, *command: str, timeout_s: float = 120.0, fails: bool = False
    ) -> subprocess.CompletedProcess[str]:
        return run(*self._command, *command, env=self.env, timeout_s=timeout_s, fails=fails)

    def containers(self) -> dict[str, list[str]]:
        """Ids of the containers of each service, stopped ones too."""
        label = f"label=com.docker.compose.project={self.project}"
        found: dict[str, list[str]] = {}
        ids = docker("ps", "--all", "--quiet", "--no-trunc", "--filter", label).split()
        for each in inspect(*ids):
            found.setdefault(each["Config"]["Labels"]["com.docker.compose.service"], []).append(each["Id"])
        return found


def _without_name(file: Path) -> Path:
    """The old command does not know a project's name in the file; it is told with ``-p`` in any case."""
    CACHE.mkdir(parents=True, exist_ok=True)
    copy = CACHE / file.name
    lines = file.read_text().splitlines(keepends=True)
    copy.write_text("".join(line for line in lines if not line.startswith("name:")))
    return copy


def inspect(*ids: str) -> list[dict[str, Any]]:
    """What Docker knows of containers."""
    if not ids:
        return []
    found = json.loads(docker("inspect", *ids))
    assert isinstance(found, list)
    return found


def logs(container: str) -> list[str]:
    """All lines that a container has written."""
    return docker("logs", container, fails=True).splitlines()


def main() -> None:
    """Say which engine there is. Without one: why, and exit code 1."""
    try:
        say(f"Docker {engine_version()}, {' '.join(compose_command())}")
    except NoEngine as error:
        sys.exit(f"test-containers: {error}")


if __name__ == "__main__":
    main()
