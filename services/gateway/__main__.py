"""``python -m services.gateway``: wiring only."""

from __future__ import annotations

import asyncio
import os
import sys

from services.gateway.config import GatewayConfig
from services.gateway.http.app import GatewayApp
from services.gateway.offload import quick_switches
from services.gateway.server import Server, connection_capacity, listen
from services.gateway.service import Gateway
from shared.bus.nats import NatsBus
from shared.ending import closed
from shared.identity import new_incarnation
from shared.process import ProcessState, run_service
from shared.settings import SettingsError
from shared.telemetry import setup_telemetry


def main() -> int:
    try:
        config = GatewayConfig.from_env(os.environ)
    except SettingsError as error:
        print(f"gateway: {error.message}", file=sys.stderr)  # noqa: T201 - before logging exists
        return 1

    async def serve(process: ProcessState) -> None:
        quick_switches()
        listener = listen(config.host, config.port)
        flush = setup_telemetry("gateway", config.gateway_id)
        try:
            incarnation = new_incarnation()
            bus = await NatsBus.connect(
                config.nats_url, name="gateway", id=config.gateway_id, incarnation=incarnation, access=config.nats
            )
            process.depend_on(bus)
            try:
                gateway = Gateway(bus, config, incarnation=incarnation)
                limits = gateway.connection_limits(connection_capacity(config.max_connections))
                server = Server(GatewayApp(gateway), drain_timeout_s=config.drain_timeout_s, limits=limits)
                await gateway.serve(server, listener, process)
            finally:
                await closed("the bus", bus.close())
        finally:
            listener.close()
            await closed("telemetry", asyncio.to_thread(flush))

    return run_service(
        "gateway",
        serve,
        log_level=config.log_level,
        die_with_parent=config.die_with_parent,
        ready_fd=config.ready_fd,
        drain_s=config.drain_timeout_s,
    )


if __name__ == "__main__":
    sys.exit(main())
