"""``python -m services.pool``: wiring only."""

from __future__ import annotations

from services.pool.config import PoolConfig
from services.pool.service import PoolService
from services.pool.store import Store
from shared.ending import end_process
from shared.process import ProcessState
from shared.service import connected, run


async def serve(config: PoolConfig, process: ProcessState) -> None:
    async with connected("pool", config, process) as connection:
        store = Store.connect(config.redis_url, config.redis_password, config.redis_password_file)
        connection.close_with("the connection to Redis", store.close)
        await store.check_password()
        pool = PoolService(connection.bus, store, config.pool, cluster=config.cluster)
        process.ready_when(pool.ready)
        await pool.run(process.stopping)


if __name__ == "__main__":
    end_process(run("pool", PoolConfig.from_env, serve))
