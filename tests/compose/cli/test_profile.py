"""``blitzscale profile``, with the mock engine: the engine is measured for real, on a tiny checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from compose.cli import run
from services.worker.profiling import measure as measuring
from shared.checkpoint import inspect_checkpoint
from shared.profile import read_profile
from tests.checkpoints import tiny_checkpoint
from tests.compose.fake_gateway import FakeGateway

QUICK_MOCK = ("--quick", "--engine", "mock")
NO_RECORDS = {"kind": "scale_records.v1", "records": []}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    return tmp_path


def status_of(checkpoint: Path, **changes: object) -> dict[str, Any]:
    found = inspect_checkpoint(checkpoint)
    known = {"name": "named", "path": str(checkpoint), "model_hash": found.model_hash}
    return {"models": [known | changes], "instances": [], "workers": [], "floors": []}


def test_a_directory_is_measured_and_the_file_says_what_it_is_of(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = inspect_checkpoint(tiny_checkpoint("llama"))
    assert run(["profile", str(checkpoint.path), *QUICK_MOCK, "--out", "m.json", "--threads", "3"]) == 0
    found = read_profile(here / "m.json")
    found.check(model_hash=checkpoint.model_hash, layout_hash=checkpoint.layout.hash, engine="mock")
    assert found.num_threads == 3
    said = capsys.readouterr()
    assert "loading from disk" in said.err
    assert "wrote m.json" in said.out


def test_a_file_that_is_there_stays_unless_it_is_forced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tiny_checkpoint("llama"))
    (here / "m.json").write_text("mine")
    assert run(["profile", path, *QUICK_MOCK, "--out", "m.json"]) == 1
    assert "m.json exists" in capsys.readouterr().err
    assert (here / "m.json").read_text() == "mine"
    assert run(["profile", path, *QUICK_MOCK, "--out", "m.json", "--force"]) == 0
    read_profile(here / "m.json")


def test_a_registered_model_is_found_by_its_name(here: Path, gateway: FakeGateway) -> None:
    path = tiny_checkpoint("llama")
    gateway.answers["GET /admin/status"] = (200, status_of(path))
    gateway.answers["GET /admin/scale"] = (200, NO_RECORDS)
    assert run(["profile", "named", *QUICK_MOCK]) == 0
    found = read_profile(here / "named.profile.json")
    assert (found.model, found.model_hash, found.mutation_is_measured) == (
        "named",
        inspect_checkpoint(path).model_hash,
        False,
    )


def test_how_long_its_instances_took_to_change_roles_is_the_stacks_word(here: Path, gateway: FakeGateway) -> None:
    def record(**changes: object) -> dict[str, Any]:
        known = {"model": "named", "plan_id": "p", "status": "done", "direction": "mutate", "desired": 1, "reason": ""}
        times = {"triggered_at_s": 1.0, "trigger_to_plan_ms": 10.0, "trigger_to_serving_ms": 35.0}
        return {"kind": "scale_record.v1"} | known | times | changes

    records = [record(), record(model="other", trigger_to_serving_ms=9e9), record(direction="out"), record()]
    gateway.answers["GET /admin/status"] = (200, status_of(tiny_checkpoint("llama")))
    gateway.answers["GET /admin/scale"] = (200, {"kind": "scale_records.v1", "records": records})
    assert run(["profile", "named", *QUICK_MOCK]) == 0
    found = read_profile(here / "named.profile.json")
    assert (found.mutation_s, found.mutation_is_measured) == (0.025, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["./none"], "./none: no such directory"),
        (["other"], "no model of that name is registered (named are)"),
        (["named", "--out", "none/x.json"], "none"),
        (["named", "--out", "."], "is a directory"),
        (["named", "--out", "x.txt"], "end in .json"),
        (["named", "--device", "cuda"], "no NVIDIA driver and GPU answer on this machine"),
        (["other", "--url", "http://127.0.0.1:1"], "no gateway answers"),
        (["other", "--url", "http://127.0.0.1:99999"], "is not the URL of a gateway"),
    ],
)
def test_wrong_usage_is_one_line_and_leaves_nothing(
    arguments: list[str], said: str, here: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["GET /admin/status"] = (200, status_of(tiny_checkpoint("llama")))
    gateway.answers["GET /admin/scale"] = (200, NO_RECORDS)
    assert run(["profile", *arguments]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert said in errors[0]
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"), [({"path": "/nowhere"}, "not on this machine"), ({"model_hash": "another"}, "was it replaced")]
)
def test_what_the_stack_serves_must_be_what_is_here(
    changes: dict[str, object], said: str, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["GET /admin/status"] = (200, status_of(tiny_checkpoint("llama"), **changes))
    gateway.answers["GET /admin/scale"] = (200, NO_RECORDS)
    assert run(["profile", "named", *QUICK_MOCK]) == 1
    assert said in capsys.readouterr().err


def test_an_interruption_leaves_no_file(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "measure", interrupted)
    assert run(["profile", str(tiny_checkpoint("llama")), *QUICK_MOCK]) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert list(here.iterdir()) == []
