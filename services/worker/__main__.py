"""``python -m services.worker``: wiring only."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys

from services.worker.config import WorkerConfig
from services.worker.device.host import HOST
from services.worker.engine.attention.kinds import attention_for
from services.worker.engine.kinds import check_device, device_of, engine_kind
from services.worker.node.facts import discover
from services.worker.node.gpu_checks import check_gpu
from services.worker.node.gpu_claims import claim_of
from services.worker.node.gpu_machine import gpu_machine
from services.worker.service import WorkerService
from shared.ending import end_process
from shared.identity import new_incarnation
from shared.process import ProcessState
from shared.service import connected, run
from shared.transport.base import TensorTransport
from shared.transport.ucx import UcxTransport
from shared.transport.ucx_worker import has_rdma

SWITCH_INTERVAL_S = 0.001
BROKEN_EXIT_CODE = 70
"""EX_SOFTWARE: the supervisor starts a fresh process."""


def fatal(why: str) -> None:
    logging.getLogger("worker").critical("%s: this process ends and must be restarted", why)
    os._exit(BROKEN_EXIT_CODE)


async def serve(config: WorkerConfig, process: ProcessState) -> None:
    # The engine's thread holds the interpreter between two kernels; the event loop and the transport
    # must not wait the default 5 ms for their turn.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    kind = engine_kind(config.engine)
    check_device(config.engine, config.device, f"BLITZ_WORKER_DEVICE={config.device}")
    attention_for(config.attention, config.device)
    for module in kind.modules:
        importlib.import_module(module)
    kind.set_threads(config.num_threads)
    computes_on_gpu = config.device == "cuda" and kind.uses_kv_memory
    if computes_on_gpu:
        check_gpu(config, await asyncio.to_thread(gpu_machine, config.visible_gpu))
    device = await asyncio.to_thread(device_of, config.engine, config.device)
    incarnation = new_incarnation()
    async with connected("worker", config, process, id=config.worker_id, incarnation=incarnation) as connection:
        transport: TensorTransport = UcxTransport(
            name=config.worker_id,
            enter=None if device is HOST else device.enter,
            on_failure=lambda error: fatal(str(error)),
        )
        connection.close_with("the transport", transport.close, if_stuck=lambda: fatal("UCX does not end"))
        if device is not HOST and not has_rdma():
            from services.worker.device.staged_transport import StagedTransport

            transport = StagedTransport(transport, device)
        node = await asyncio.to_thread(discover, config)
        logging.getLogger("worker").info("%s", node.describe())
        # Held while the service takes its memory: it is not free to others any more, and not yet taken.
        claim = await process.unless_stopping(asyncio.to_thread(claim_of, config)) if computes_on_gpu else None
        service = WorkerService(
            connection.bus,
            transport,
            config,
            pid=os.getpid(),
            fatal=fatal,
            node=node,
            device=device,
            incarnation=incarnation,
        )
        if claim is not None:
            claim.allocated()
        process.ready_when(service.registered)
        await service.run(process.stopping)


if __name__ == "__main__":
    end_process(run("worker", WorkerConfig.from_env, serve))
