"""``python -m services.planner``: wiring only."""

from __future__ import annotations

import asyncio
import os
import sys

from services.planner.config import PlannerConfig
from services.planner.service import PlannerService
from shared.bus.nats import NatsBus
from shared.ending import closed
from shared.process import ProcessState, run_service
from shared.settings import SettingsError
from shared.telemetry import setup_telemetry


def main() -> int:
    try:
        config = PlannerConfig.from_env(os.environ)
    except SettingsError as error:
        print(f"planner: {error.message}", file=sys.stderr)  # noqa: T201 - before logging exists
        return 1

    async def serve(process: ProcessState) -> None:
        flush = setup_telemetry("planner")
        bus = await NatsBus.connect(config.nats_url, name="planner", access=config.nats)
        process.depend_on(bus)
        try:
            await bus.keep_plan_stream(config.stream)
            planner = PlannerService(
                bus,
                lease_ttl_s=config.lease_ttl_s,
                load_floor_gbps=config.load_floor_gbps,
                strategy=config.strategy,
                knows_flows=config.knows_flows,
                busy_nic_share=config.busy_nic_share,
                live=config.live,
            )
            process.ready_when(planner.subscribed)
            await planner.run(process.stopping)
        finally:
            process.ready = False
            await asyncio.gather(closed("the bus", bus.close()), closed("telemetry", asyncio.to_thread(flush)))

    return run_service(
        "planner",
        serve,
        log_level=config.log_level,
        health_port=config.health_port,
        health_host=config.health_host,
        die_with_parent=config.die_with_parent,
        ready_fd=config.ready_fd,
    )


if __name__ == "__main__":
    sys.exit(main())
