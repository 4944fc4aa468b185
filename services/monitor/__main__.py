"""``python -m services.monitor``: wiring only."""

from __future__ import annotations

import asyncio
import os
import sys

from services.monitor.config import MonitorConfig
from services.monitor.service import MonitorService
from shared.bus.nats import NatsBus
from shared.ending import closed
from shared.process import ProcessState, run_service
from shared.settings import SettingsError
from shared.telemetry import setup_telemetry


def main() -> int:
    try:
        config = MonitorConfig.from_env(os.environ)
    except SettingsError as error:
        print(f"monitor: {error.message}", file=sys.stderr)  # noqa: T201 - before logging exists
        return 1

    async def serve(process: ProcessState) -> None:
        flush = setup_telemetry("monitor")
        bus = await NatsBus.connect(config.nats_url, name="monitor", access=config.nats)
        process.depend_on(bus)
        try:
            monitor = MonitorService(bus, config.policy, interval_s=config.interval_s, repeat_s=config.repeat_s)
            process.ready_when(monitor.subscribed)
            await monitor.run(process.stopping)
        finally:
            process.ready = False
            await asyncio.gather(closed("the bus", bus.close()), closed("telemetry", asyncio.to_thread(flush)))

    return run_service(
        "monitor",
        serve,
        log_level=config.log_level,
        health_port=config.health_port,
        health_host=config.health_host,
        die_with_parent=config.die_with_parent,
        ready_fd=config.ready_fd,
    )


if __name__ == "__main__":
    sys.exit(main())
