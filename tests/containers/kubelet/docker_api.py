"""The Docker engine's API on its socket, as far as pods need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

_SOCKET = "/var/run/docker.sock"
_TIMEOUT_S = 180.0
_FRAME_HEADER_BYTES = 8


class DockerApi:
    """Of one event loop."""

    def __init__(self) -> None:
        transport = httpx.AsyncHTTPTransport(uds=_SOCKET, limits=httpx.Limits(max_connections=None))
        self._http = httpx.AsyncClient(transport=transport, base_url="http://docker/v1.40", timeout=_TIMEOUT_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def create(self, name: str, config: Mapping[str, Any]) -> str:
        """Gives the container's id."""
        return str((await self._ask("POST", f"/containers/create?name={name}", config))["Id"])

    async def start(self, container: str) -> None:
        await self._ask("POST", f"/containers/{container}/start")

    async def wait(self, container: str) -> int:
        """Until it has ended; gives the exit code."""
        return int((await self._ask("POST", f"/containers/{container}/wait", timeout_s=None))["StatusCode"])

    async def kill(self, container: str, signal: str) -> None:
        """Nothing happens if it does not run."""
        await self._ask("POST", f"/containers/{container}/kill?signal={signal}", expected=(404, 409))

    async def remove(self, container: str) -> None:
        await self._ask("DELETE", f"/containers/{container}?force=true&v=true", expected=(404,))

    async def execute(self, container: str, command: Sequence[str]) -> tuple[int, str]:
        """Exit code and output of a command in a container that runs; -1 if the container does not."""
        asked = {"AttachStdout": True, "AttachStderr": True, "Cmd": list(command)}
        made = await self._ask("POST", f"/containers/{container}/exec", asked, expected=(404, 409))
        if "Id" not in made:
            return -1, str(made)
        answer = await self._http.post(f"/exec/{made['Id']}/start", json={"Detach": False, "Tty": False})
        code = (await self._ask("GET", f"/exec/{made['Id']}/json"))["ExitCode"]
        return (-1 if code is None else int(code)), _text(answer.content)

    async def logs(self, container: str) -> str:
        answer = await self._http.get(f"/containers/{container}/logs?stdout=true&stderr=true")
        return _text(answer.content) if answer.status_code == httpx.codes.OK else ""

    async def make_network(self, name: str, bridge: str, subnet: str, gateway: str) -> None:
        config = {
            "Name": name,
            "IPAM": {"Config": [{"Subnet": subnet, "Gateway": gateway}]},
            "Options": {"com.docker.network.bridge.name": bridge},
        }
        await self._ask("POST", "/networks/create", config)

    async def remove_network(self, name: str) -> None:
        await self._ask("DELETE", f"/networks/{name}", expected=(404,))

    async def labelled(self, label: str) -> list[str]:
        """Ids of all containers that have a label."""
        filters = f'{{"label":["{label}"]}}'
        found = await self._ask("GET", f"/containers/json?all=true&filters={filters}")
        return [each["Id"] for each in found]

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        expected: Sequence[int] = (),
        timeout_s: float | None = _TIMEOUT_S,
    ) -> Any:
        """Raises ``RuntimeError`` for statuses of failure that are not ``expected``."""
        answer = await self._http.request(method, path, json=body, timeout=timeout_s)
        if answer.status_code >= httpx.codes.BAD_REQUEST and answer.status_code not in expected:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text.strip()}")
        return answer.json() if answer.content else {}


def _text(frames: bytes) -> str:
    """Output comes in frames with a header, which ends with the length."""
    parts = []
    while len(frames) >= _FRAME_HEADER_BYTES:
        end = _FRAME_HEADER_BYTES + int.from_bytes(frames[4:_FRAME_HEADER_BYTES], "big")
        parts.append(frames[_FRAME_HEADER_BYTES:end])
        frames = frames[end:]
    return b"".join(parts).decode(errors="replace")
