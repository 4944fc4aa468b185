from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from bench.replay.compare import app
from shared.messages.admin import WhyStatus
from shared.messages.operations import ScaleRecords
from tests.bench.operation import made_up
from tests.compose.fake_gateway import FakeGateway, fake_gateway

NOT_FOUND = (404, {"error": {"message": "no such plan", "code": "plan_not_found"}})


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """Knows plan-2 of other, the newest, and plan-1 of demo."""
    with fake_gateway() as made:
        records = (made_up.record(plan_id="plan-2", model="other"), made_up.record())
        for record in records:
            made.answers[f"GET /admin/scale/{record.plan_id}"] = (200, msgspec.to_builtins(record))
        made.answers["GET /admin/scale"] = (200, msgspec.to_builtins(ScaleRecords(records=records)))
        made.answers["GET /admin/scale/demo"] = made.answers["GET /admin/scale/absent"] = NOT_FOUND
        why = WhyStatus(model="demo", decisions=(made_up.decision(),))
        made.answers["GET /admin/why/demo"] = (200, msgspec.to_builtins(why))
        made.answers["GET /admin/why/other"] = (404, {"error": {"message": "gone", "code": "model_not_found"}})
        yield made


def _run(url: str, *arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments), "--url", url], env={"COLUMNS": "200", "BLITZ_ADMIN_KEY": ""})


@pytest.mark.parametrize(("name", "plan"), [("plan-1", "plan-1"), ("demo", "plan-1"), ("latest", "plan-2")])
def test_an_operation_is_found_by_its_id_its_model_or_as_the_newest(gateway: FakeGateway, name: str, plan: str) -> None:
    found = _run(gateway.url, name, "--json")
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["record"]["plan_id"] == plan
    assert report["record"]["live"][0]["batches"], "lists leave them out"
    assert report["is_its_decision"] == (plan == "plan-1")
    assert report["lacking"] == ("" if plan == "plan-1" else "the model is no longer registered")


def test_the_terminal_says_it_in_short_and_the_page_in_full(gateway: FakeGateway, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    file = tmp_path / "report.html"
    found = _run(gateway.url, "plan-1", "-o", file)
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("demo was scaled out to 4 instances: 3 of 3 serving, the last after 127 ms")
    assert "first cooperative token   71.0 ms" in found.stdout
    assert "1 instance would have 240 % more to do" in file.read_text()


def test_what_failed_and_what_was_left_out_is_said_on_the_terminal(gateway: FakeGateway) -> None:
    gateway.answers["GET /admin/scale/plan-1"] = (200, msgspec.to_builtins(made_up.failed()))
    found = _run(gateway.url, "plan-1")
    assert found.exit_code == 0
    assert found.stderr.splitlines() == [
        "failed: worker-2: the worker died",
        "left out: worker-9: it refused the model lately",
    ]


def test_what_is_neither_file_nor_operation_is_one_line(gateway: FakeGateway, tmp_path: Path) -> None:
    found = _run(gateway.url, "absent", "-o", tmp_path / "x.html")
    assert (found.exit_code, found.output) == (
        1,
        f"error: absent: no such file here; at {gateway.url} no scale operation has that id, and none of the newest "
        "100 is of a model of that name\n",
    )
    found = _run("http://127.0.0.1:1", "absent")
    assert found.exit_code == 1
    assert found.output.startswith("error: absent: no such file here, and no stack to ask for an operation: no gateway")
    assert not list(tmp_path.iterdir())


def test_files_are_replays_and_a_missing_one_asks_nobody(gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "plan-1").write_text("{}")
    for arguments in ([tmp_path / "plan-1"], [tmp_path], [tmp_path / "absent.json"], ["plan-1", "plan-2"]):
        found = _run(gateway.url, *arguments)
        assert found.exit_code == 2, found.output
        assert found.output.startswith("error: ")
    assert not gateway.requests


def test_options_of_the_one_are_not_taken_with_the_other(gateway: FakeGateway, tmp_path: Path) -> None:
    for arguments in (["plan-1", "--slo-ttft", "100"], ["plan-1", "--png", tmp_path / "x.png"], [tmp_path, "--json"]):
        assert _run(gateway.url, *arguments).exit_code == 2
    assert not gateway.requests
