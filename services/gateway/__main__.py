"""``python -m services.gateway``: wiring only."""

from __future__ import annotations

import contextlib

from services.gateway.config import GatewayConfig
from services.gateway.http.app import GatewayApp
from services.gateway.offload import quick_switches
from services.gateway.server import Server, connection_capacity, listen
from services.gateway.service import Gateway
from shared.ending import end_process
from shared.identity import new_incarnation
from shared.process import ProcessState
from shared.service import connected, run


async def serve(config: GatewayConfig, process: ProcessState) -> None:
    quick_switches()
    incarnation = new_incarnation()
    with contextlib.closing(listen(config.host, config.port)) as listener:
        async with connected("gateway", config, process, id=config.gateway_id, incarnation=incarnation) as connection:
            gateway = Gateway(connection.bus, config, incarnation=incarnation)
            limits = gateway.connection_limits(connection_capacity(config.max_connections))
            server = Server(GatewayApp(gateway), drain_timeout_s=config.drain_timeout_s, limits=limits)
            await gateway.serve(server, listener, process)


if __name__ == "__main__":
    end_process(run("gateway", GatewayConfig.from_env, serve))
