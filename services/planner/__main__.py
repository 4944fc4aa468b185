"""``python -m services.planner``: wiring only."""

from __future__ import annotations

from services.planner.config import PlannerConfig
from services.planner.service import PlannerService
from shared.ending import end_process
from shared.process import ProcessState
from shared.service import connected, run


async def serve(config: PlannerConfig, process: ProcessState) -> None:
    async with connected("planner", config, process) as connection:
        await connection.bus.keep_plan_stream(config.stream)
        planner = PlannerService(connection.bus, config.plans, profiles=config.profiles)
        process.ready_when(planner.subscribed)
        await planner.run(process.stopping)


if __name__ == "__main__":
    end_process(run("planner", PlannerConfig.from_env, serve))
