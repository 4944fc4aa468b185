from __future__ import annotations

import msgspec

from compose.admin_types import Status
from services.gateway.http.status import status_json
from shared.messages.registry import Floor
from tests.records import model, view, worker_record

M = model("m")


def test_roles_of_instances_and_the_floors_of_each_role_are_shown() -> None:
    floors = (
        Floor(model="m", instances=2, until_s=9.0, role="prefill"),
        Floor(model="m", instances=1, until_s=9.0, role="decode"),
        Floor(model="m", instances=3, until_s=9.0),
    )
    workers = (worker_record("w0", M, "serving", role="prefill"), worker_record("w1", M, "serving"))
    found = status_json(view(*workers, models=(M,), floors=floors))
    assert [(f["role"], f["instances"]) for f in found["floors"]] == [("prefill", 2), ("decode", 1), ("colocated", 3)]
    read = msgspec.convert(found, Status)
    assert [i.role for i in read.instances] == ["prefill", "colocated"]
