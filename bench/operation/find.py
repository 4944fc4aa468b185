"""Asks a gateway for an operation and the decision behind it."""

from __future__ import annotations

from bench.operation.report import OperationReport
from compose.admin import AdminClient
from shared.errors import ModelNotFound, NotFound, PlanNotFound
from shared.messages.decisions import MAX_DECISIONS
from shared.messages.operations import ScaleRecord

LATEST = "latest"
"""Stands for the newest operation that did something."""
MAX_RECORDS = 100
"""The newest, among which a model's is looked for: as many as a gateway lists."""


async def find_operation(client: AdminClient, name: str) -> OperationReport:
    """``name``: a plan id, a model for its newest operation, or ``latest``. Raises ``PlanNotFound``, and what else the
    gateway answers."""
    record = await _record(client, name)
    try:
        why = await client.why(record.model, limit=MAX_DECISIONS)
    except ModelNotFound:
        return OperationReport.of(record, (), "the model is no longer registered")
    lacking = "no planner answered" if "planner" in why.silent else ""
    return OperationReport.of(record, why.decisions, lacking)


async def _record(client: AdminClient, name: str) -> ScaleRecord:
    if name != LATEST:
        try:
            return await client.scale_record(name)
        except NotFound:
            pass  # it may be a model
    # Lists leave batches out.
    for record in await client.scale_records(limit=MAX_RECORDS):
        if name == record.model or (name == LATEST and record.direction != "none"):
            return await client.scale_record(record.plan_id)
    if name == LATEST:
        raise PlanNotFound(f"{client.url} knows no scale operation yet")
    raise PlanNotFound(
        f"{name}: no such file here; at {client.url} no scale operation has that id, and none of the newest "
        f"{MAX_RECORDS} is of a model of that name"
    )
