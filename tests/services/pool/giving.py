"""How a model comes to a registry that does not know it: from a worker that holds a copy, which is asked for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from shared.errors import BlitzError
from shared.messages.common import Ack
from shared.messages.registry import HeartbeatAck, ModelRecord, RestoreModel
from tests.services.pool.host_copies import copy_of, holding

Ask = Callable[[str, Any, type[Any]], Awaitable[Any]]
GIVER = "giver"


async def give(ask: Ask, record: ModelRecord) -> BlitzError | None:
    """Have ``record`` restored; the registry's refusal, if there is one. The worker that gives it leaves again."""
    refusal: BlitzError | None = None
    ack = await ask("heartbeat", holding(GIVER, [copy_of(record)]), HeartbeatAck)
    if record.model_hash in ack.wants_models:
        try:
            await ask("restore_model", RestoreModel(model=record), Ack)
        except BlitzError as error:
            refusal = error
    await ask("heartbeat", holding(GIVER, sequence=2, leaving=True), HeartbeatAck)
    return refusal
