"""``python -m services.pool``: wiring only."""

from __future__ import annotations

import asyncio
import os
import sys

from services.pool.config import PoolConfig
from services.pool.service import PoolService
from services.pool.store import Store
from shared.bus.nats import NatsBus
from shared.ending import closed
from shared.process import ProcessState, run_service
from shared.settings import SettingsError
from shared.telemetry import setup_telemetry


def main() -> int:
    try:
        config = PoolConfig.from_env(os.environ)
    except SettingsError as error:
        print(f"pool: {error.message}", file=sys.stderr)  # noqa: T201 - before logging exists
        return 1

    async def serve(process: ProcessState) -> None:
        flush = setup_telemetry("pool")
        bus = await NatsBus.connect(config.nats_url, name="pool", access=config.nats)
        process.depend_on(bus)
        store = Store.connect(config.redis_url, config.redis_password)
        try:
            await store.check_password()
            pool = PoolService(
                bus,
                store,
                lease_s=config.lease_s,
                seat=config.seat,
                first=config.first,
                model_roots=config.model_roots,
                loads=config.loads,
            )
            process.ready_when(pool.ready)
            await pool.run(process.stopping)
        finally:
            process.ready = False
            await asyncio.gather(
                closed("the bus", bus.close()),
                closed("the connection to Redis", store.close()),
                closed("telemetry", asyncio.to_thread(flush)),
            )

    return run_service(
        "pool",
        serve,
        log_level=config.log_level,
        health_port=config.health_port,
        health_host=config.health_host,
        die_with_parent=config.die_with_parent,
        ready_fd=config.ready_fd,
    )


if __name__ == "__main__":
    sys.exit(main())
