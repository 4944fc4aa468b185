"""``python -m services.worker``: wiring only."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from services.worker.config import WorkerConfig
from services.worker.node.facts import discover
from services.worker.service import WorkerService
from shared.bus.nats import NatsBus
from shared.ending import closed
from shared.errors import BlitzError
from shared.identity import new_incarnation
from shared.process import ProcessState, run_service
from shared.settings import SettingsError
from shared.telemetry import setup_telemetry
from shared.transport.ucx import UcxTransport

SWITCH_INTERVAL_S = 0.001
BROKEN_EXIT_CODE = 70
"""EX_SOFTWARE: the supervisor starts a fresh process."""


def main() -> int:
    try:
        config = WorkerConfig.from_env(os.environ)
    except SettingsError as error:
        print(f"worker: {error.message}", file=sys.stderr)  # noqa: T201 - before logging exists
        return 1

    def fatal(why: str) -> None:
        logging.getLogger("worker").critical("%s: this process ends and must be restarted", why)
        os._exit(BROKEN_EXIT_CODE)

    async def serve(process: ProcessState) -> None:
        # The engine's thread holds the interpreter between two kernels; the event loop and the transport
        # must not wait the default 5 ms for their turn.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if config.engine == "torch":
            import torch

            import services.worker.engine.warm_up  # noqa: F401 - not in the middle of the first load

            torch.set_num_threads(config.num_threads)
            if config.device == "cuda":
                raise BlitzError("BLITZ_WORKER_DEVICE=cuda: this build serves on the CPU only")
        flush = setup_telemetry("worker", config.worker_id)
        incarnation = new_incarnation()
        bus = await NatsBus.connect(
            config.nats_url, name="worker", id=config.worker_id, incarnation=incarnation, access=config.nats
        )
        process.depend_on(bus)
        transport = UcxTransport.start(name=config.worker_id, on_failure=lambda error: fatal(str(error)))
        try:
            node = await asyncio.to_thread(discover, config)
            logging.getLogger("worker").info("%s", node.describe())
            service = WorkerService(
                bus, transport, config, pid=os.getpid(), fatal=fatal, node=node, incarnation=incarnation
            )
            process.ready_when(service.registered)
            await service.run(process.stopping)
        finally:
            process.ready = False
            ended, _, _ = await asyncio.gather(
                closed("the transport", transport.close()),
                closed("the bus", bus.close()),
                closed("telemetry", asyncio.to_thread(flush)),
            )
            if not ended:
                fatal("UCX does not end")

    return run_service(
        config.worker_id,
        serve,
        log_level=config.log_level,
        health_port=config.health_port,
        health_host=config.health_host,
        die_with_parent=config.die_with_parent,
        ready_fd=config.ready_fd,
        drain_s=config.drain_timeout_s,
    )


if __name__ == "__main__":
    sys.exit(main())
