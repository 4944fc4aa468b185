from __future__ import annotations

from services.pool.core.routes import routes_by_model
from tests.records import heartbeat, model


def test_only_instances_that_are_up_have_routes() -> None:
    m = model("m")
    reports = [
        heartbeat("w0"),
        heartbeat("w1", m, "loading"),
        heartbeat("w3", m, "draining"),
        heartbeat("w2", m, "serving"),
        heartbeat("w5", m, "live"),
        heartbeat("w4", m, "failed"),
    ]
    routes = routes_by_model(reports, [m])
    assert [(r.worker_id, r.state) for r in routes["m"]] == [("w2", "serving"), ("w3", "draining"), ("w5", "live")]


def test_models_without_routes_are_absent() -> None:
    assert routes_by_model([heartbeat("w0")], [model("m")]) == {}


def test_instances_of_other_weights_under_the_same_name_have_no_routes() -> None:
    old, new = model("m", model_hash="old"), model("m", model_hash="new")
    reports = [heartbeat("w0", old, "serving"), heartbeat("w1", new, "serving")]
    assert [r.worker_id for r in routes_by_model(reports, [new])["m"]] == ["w1"]
    assert routes_by_model(reports, []) == {}
