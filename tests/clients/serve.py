"""``python -m tests.clients.serve``: a stack to talk to, until the standard input ends. Runs in the project's own
environment.

Prints one line of JSON once everything serves: ``url``, and the directory of each model.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from compose.config import StackConfig
from compose.stack import Stack
from tests.checkpoints import write_checkpoint
from tests.clients.names import KEY, RANDOM, SCRIPTED
from tests.clients.scripted_model import write_scripted_model

_READY_S = 240.0
_ENV = {
    "BLITZ_API_KEYS": KEY,
    "BLITZ_WORKER_ARENA_MIB": "64",
    "BLITZ_WORKER_KV_MIB": "128",
    # No load moves the monitor.
    "BLITZ_MONITOR_PREFILL_TOKENS_PER_S": "1e9",
    "BLITZ_MONITOR_RATE_WINDOW_S": "60",
}


async def _serve(folder: Path) -> None:
    models = {RANDOM: folder / RANDOM, SCRIPTED: folder / SCRIPTED}
    write_checkpoint(models[RANDOM], "llama")
    write_scripted_model(models[SCRIPTED])
    config = StackConfig(
        models=tuple(models.values()), state_dir=folder / "state", workers=len(models), port=0, env=_ENV
    )
    async with Stack(config) as stack:
        await stack.wait_ready(_READY_S)
        ready = {"url": stack.url, "models": {name: str(path) for name, path in models.items()}}
        print(json.dumps(ready), flush=True)  # noqa: T201 - what starts it, reads it
        await asyncio.to_thread(sys.stdin.read)


def _main() -> None:
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        asyncio.run(_serve(Path(folder)))


if __name__ == "__main__":
    _main()
