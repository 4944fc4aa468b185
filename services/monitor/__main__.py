"""``python -m services.monitor``: wiring only."""

from __future__ import annotations

from services.monitor.config import MonitorConfig
from services.monitor.service import MonitorService
from shared.ending import end_process
from shared.process import ProcessState
from shared.service import connected, run


async def serve(config: MonitorConfig, process: ProcessState) -> None:
    async with connected("monitor", config, process) as connection:
        monitor = MonitorService(
            connection.bus,
            config.policy,
            interval_s=config.interval_s,
            repeat_s=config.repeat_s,
            profiles=config.profiles,
        )
        process.ready_when(monitor.subscribed)
        await monitor.run(process.stopping)


if __name__ == "__main__":
    end_process(run("monitor", MonitorConfig.from_env, serve))
