"""The hostile clients against a real stack, for a moment: everybody else is served, and memory stays bounded."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.hostile import measure
from bench.hostile.clients import HostileResult
from bench.hostile.measure import ALLOWED_RSS_BYTES, Outcome, measure_hostile
from bench.stats import Summary
from tests.wait_until import WAIT_S


@pytest.mark.stack
async def test_beside_hostile_clients_everybody_else_is_served_and_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A request may take a second, and half a minute on a busy machine, of which the hostile clients take what there is.
    for patience in ("TIMEOUT_S", "READY_S"):
        monkeypatch.setattr(measure, patience, WAIT_S)
    outcome = await measure_hostile(6.0, idle_connections=2000, pause_s=0.0, on_step=lambda step: None)
    assert outcome.faults == {}
    assert outcome.attacked.count > 0
    assert outcome.rss_max_bytes < ALLOWED_RSS_BYTES
    assert set(outcome.hostile.answers) == {"prompts 200", "stop_tokens 413"}
    assert outcome.hostile.idle_connections >= 2000


def outcome(idle_ms: float, attacked_ms: float, *, rss_bytes: int = 0, faults: dict[str, int] | None = None) -> Outcome:
    before, after = Summary.of([idle_ms]), Summary.of([attacked_ms])
    assert before is not None
    assert after is not None
    nothing = HostileResult(answers={}, idle_connections=0, slow_bytes=0)
    return Outcome(before, after, faults or {}, 0, rss_bytes, nothing)


@pytest.mark.parametrize(("idle_ms", "attacked_ms", "holds"), [(5, 55, True), (5, 56, False), (80, 160, True)])
def test_a_first_token_may_take_twice_its_idle_time_or_50_ms_more(
    idle_ms: float, attacked_ms: float, holds: bool
) -> None:
    assert outcome(idle_ms, attacked_ms).holds is holds


def test_faults_and_too_much_memory_do_not_hold() -> None:
    assert not outcome(5, 5, rss_bytes=ALLOWED_RSS_BYTES + 1).holds
    assert not outcome(5, 5, faults={"http_429": 1}).holds


def test_help_goes_to_the_benchmark_itself() -> None:
    result = CliRunner().invoke(app, ["hostile", "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "--connections" in result.output
