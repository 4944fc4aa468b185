"""One running deployment, and what tests do with it."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from openai import OpenAI, OpenAIError

from compose.demo_model import NAME, ensure_demo_model
from compose.ports import free_port
from tests.containers.engine import CACHE, Compose, docker, inspect, logs, run, say
from tests.wait_until import eventually_sync

SERVICES = ("nats", "redis", "jaeger", "pool", "planner", "monitor", "gateway", "worker")
ADMIN_KEY = "tests-admin-key"
MODELS = CACHE / "models"
NUM_WORKERS = 2
HEALTHY_S = 240.0
NUM_TOKENS = 120
TRACES = "http://127.0.0.1:16686"
SMALL = {
    "BLITZ_WORKERS": str(NUM_WORKERS),
    "BLITZ_WORKER_ARENA_MIB": "256",
    "BLITZ_WORKER_KV_MIB": "128",
    "BLITZ_WORKER_HOST_CACHE_MIB": "64",
    "BLITZ_WORKER_THREADS": "1",
    "BLITZ_SHM_SIZE": "512m",
}


def credentials(name: str) -> Path:
    """A folder with passwords of its own."""
    folder = CACHE / name
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "compose", "credentials", folder)
    return folder


class Deployment:
    """All services of one project."""

    def __init__(self, project: str, images: Mapping[str, str], secrets: Path, **env: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = ensure_demo_model(MODELS)
        MODELS.chmod(0o755)
        self.env = {
            **images,
            **SMALL,
            "BLITZ_MODELS": str(MODELS),
            "BLITZ_CREDENTIALS": str(secrets),
            "BLITZ_ADMIN_KEY": ADMIN_KEY,
            "BLITZ_PORT": str(self.port),
            **env,
        }
        self.compose = Compose(project, self.env)
        self.ids: dict[str, str] = {}

    def up(self, *services: str) -> float:
        """Start, and wait until all are healthy; gives the seconds."""
        began_s = time.monotonic()
        self.compose("up", "-d", "--no-build", *services, timeout_s=HEALTHY_S)
        self.ids = {name: found[0] for name, found in self.compose.containers().items()}
        self.wait_healthy()
        return time.monotonic() - began_s

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "40", timeout_s=HEALTHY_S, fails=True)

    def states(self) -> dict[str, dict[str, Any]]:
        """By service: ``State`` as Docker tells it."""
        by_id = {each["Id"]: each for each in inspect(*self.ids.values())}
        return {name: by_id[found]["State"] for name, found in self.ids.items()}

    def wait_healthy(self, *services: str) -> None:
        """Until the health check of each says so; of one without: until it runs."""

        def all_are() -> bool:
            states = {name: state for name, state in self.states().items() if not services or name in services}
            return all(
                s["Running"] and s.get("Health", {}).get("Status", "healthy") == "healthy" for s in states.values()
            )

        try:
            eventually_sync(all_are, HEALTHY_S)
        except AssertionError as error:
            told = [f"{name}: {line}" for name, found in self.ids.items() for line in logs(found)[-5:]]
            raise AssertionError("\n".join([str(error), str(self.states()), *told])) from None

    def inside(self, service: str, *command: str) -> str:
        """What a command in a container writes."""
        return docker("exec", self.ids[service], *command, fails=True)

    def command(self, *words: str, key: str = ADMIN_KEY, fails: bool = False) -> str:
        """``blitzscale`` outside of the containers. What it writes, errors too."""
        env = {"BLITZ_URL": self.url, "BLITZ_ADMIN_KEY": key}
        ended = run(sys.executable, "-m", "compose", *words, env=env, timeout_s=180.0, fails=fails)
        assert not fails or ended.returncode, ended.stdout
        return ended.stdout + ended.stderr

    def serve_demo(self) -> None:
        """Add the model if it is not there, and wait for its first instance."""
        if NAME not in self.command("models", "list"):
            self.command("models", "add", str(self.model), "--min-instances", "1")
        eventually_sync(lambda: self._answers(), HEALTHY_S)

    def _answers(self) -> bool:
        try:
            return bool(complete(self.client()))
        except OpenAIError:
            return False

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=HEALTHY_S)

    def instances(self) -> int:
        status = json.loads(self.command("status", "--json"))
        return len([each for each in status["instances"] if each["model"] == NAME])


def chat(client: OpenAI) -> Iterator[str]:
    """Greedy text of ``NUM_TOKENS`` tokens, streamed."""
    events = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Say something."}],
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for event in events:
        if event.choices and event.choices[0].delta.content:
            yield event.choices[0].delta.content


def complete(client: OpenAI) -> str:
    return "".join(chat(client))


class Reader(threading.Thread):
    """Reads one stream after the other until it is told to stop; the last one to its end."""

    def __init__(self, client: OpenAI) -> None:
        super().__init__(daemon=True)
        self.texts: list[str] = []
        self.errors: list[str] = []
        self.num_pieces = 0
        self.stopping = threading.Event()
        self._client = client
        self.start()

    def run(self) -> None:
        while not self.stopping.is_set() and not self.errors:
            text = ""
            try:
                for piece in chat(self._client):
                    text += piece
                    self.num_pieces += 1
            except OpenAIError as error:
                self.errors.append(f"{error!r} after {len(text)} letters")
            else:
                self.texts.append(text)


class HasClient(Protocol):
    """What is served somehow."""

    def client(self) -> OpenAI: ...


@contextmanager
def undisturbed_streams(deployment: HasClient, num: int = 3) -> Iterator[None]:
    """Streams that run meanwhile, all of which must give the text that one gives alone."""
    with deployment.client() as client:
        expected = complete(client)
        readers = [Reader(client) for _ in range(num)]
        try:
            eventually_sync(lambda: all(reader.num_pieces > 10 for reader in readers))
            yield
            begun = [reader.num_pieces for reader in readers]
            eventually_sync(
                lambda: all(r.num_pieces > before or r.errors for r, before in zip(readers, begun, strict=True))
            )
        finally:
            for reader in readers:
                reader.stopping.set()
            for reader in readers:
                reader.join(HEALTHY_S)
        errors = [error for reader in readers for error in reader.errors]
        assert not errors, errors
        assert not any(reader.is_alive() for reader in readers)
        texts = [text for reader in readers for text in reader.texts]
        say(f"{len(texts)} streams")
        others = [text for text in texts if text != expected]
        assert not others, (expected, others)


def traces(service: str) -> dict[str, list[str]]:
    """Names of a service's spans by trace."""
    found = _ask(f"/api/traces?service={service}")
    return {each["traceID"]: [span["operationName"] for span in each["spans"]] for each in found}


def traced_services() -> set[str]:
    return set(_ask("/api/services"))


def _ask(path: str) -> Any:
    with urllib.request.urlopen(TRACES + path, timeout=10) as answer:
        return json.load(answer)["data"]
