"""Debian's Prometheus as a process, and what it is asked."""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from compose.ports import free_port
from tests.plain_http import http_client
from tests.wait_until import eventually_sync

END_S = 30.0


def program(name: str) -> str:
    """Fails where there is none: without it nothing is shown."""
    found = shutil.which(name)
    assert found, f"there is no {name}: apt install prometheus"
    return found


class Prometheus:
    """One that runs."""

    def __init__(self, url: str) -> None:
        self._http = http_client(base_url=url, timeout=60)

    async def close(self) -> None:
        await self._http.aclose()

    async def values(self, expr: str) -> dict[str, float]:
        """What a query gives now, by labels: numbers only. ``AssertionError`` with what is wrong with it."""
        found = await self.ask("/api/v1/query", query=expr)
        rows = [(str(sorted(row["metric"].items())), float(row["value"][1])) for row in found["result"]]
        return {labels: value for labels, value in rows if not math.isnan(value)}

    async def ask(self, path: str, **parameters: str) -> Any:
        answer = (await self._http.get(path, params=parameters)).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]


@contextlib.contextmanager
def running(config: Path, folder: Path) -> Iterator[str]:
    """Its URL. What it says is in ``prometheus.log``."""
    port = free_port()
    command = [
        program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            eventually_sync(lambda: process.poll() is not None or _is_up(url))
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            yield url
        finally:
            process.terminate()
            process.wait(END_S)


def _is_up(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/-/ready", verify=False).status_code == 200
    return False
