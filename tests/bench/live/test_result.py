from __future__ import annotations

import json

import pytest
from rich.console import Console

from bench import machine
from bench.live import table
from bench.live.modes import BEST_EFFORT, PLAIN, STOP_THE_WORLD, ZIGZAG
from bench.live.result import document
from tests.bench.live.samples import assignment, result, run

STOP = ((0.1, 0.2, 0.3, 0.4), (0.2, 0.4, 0.6, 0.8), (0.1, 0.2, 0.3, 9.0))
RESULT = result(
    *[run(STOP_THE_WORLD, ttft_s, assigned=assignment()) for ttft_s in STOP],
    run(BEST_EFFORT, (0.2, 0.3, 0.4, 0.6)),
    run(ZIGZAG, (0.05, 0.08, 0.11, 0.16)),
)


def test_figures_are_medians_over_the_repetitions() -> None:
    assert RESULT.seconds(STOP_THE_WORLD, "mean_s") == pytest.approx(0.5)
    assert RESULT.seconds(STOP_THE_WORLD, "worst_s") == pytest.approx(0.8)
    assert RESULT.typical(STOP_THE_WORLD).ttft_s == STOP[1]


def test_ratios_are_of_medians() -> None:
    assert RESULT.ratio(ZIGZAG, STOP_THE_WORLD, "mean_s") == pytest.approx(0.2)
    assert RESULT.ratio(BEST_EFFORT, STOP_THE_WORLD, "worst_s") == pytest.approx(0.75)
    assert RESULT.ratio(ZIGZAG, PLAIN, "mean_s") is None


def test_deviations_are_from_the_playback_of_the_same_mode() -> None:
    playback_s = RESULT.runs[-1].planned.mean_s
    assert RESULT.deviation(ZIGZAG, "mean_s", "planned") == pytest.approx(0.1 / playback_s - 1)


def test_layers_per_second_are_in_units_of_one_instance() -> None:
    assert RESULT.layers_per_s(ZIGZAG) == pytest.approx(6 / 0.05 * 0.01)
    assert result(run(PLAIN, STOP[0])).layers_per_s(PLAIN) is None


def test_the_document_has_the_mocks_figures_at_the_top_and_torchs_below() -> None:
    torch = result(run(ZIGZAG, (0.1,) * 4, text="other", engine="torch"), engine="torch")
    written = json.loads(json.dumps(document([RESULT, torch], machine=machine.describe(), command="blitzscale ...")))
    assert written["engine"] == "mock"
    assert written["torch"]["engine"] == "torch"
    for each in (written, written["torch"]):
        assert each["playback"].keys() == each["playback_recorded"].keys() == each["modes"].keys()
        assert {"ttft_mean_s", "ttft_p99_s", "ttft_worst_s"} <= each["playback"]["zigzag"].keys()
        assert {"ttft_mean_s", "ttft_p99_s", "ttft_s", "timeline"} <= each["modes"]["zigzag"].keys()
    assert written["modes"].keys() == {"stop_the_world", "best_effort", "zigzag"}
    assert written["modes"]["zigzag"]["ttft_s"] == [0.05, 0.08, 0.11, 0.16]
    assert written["ratios"]["zigzag_of_stop_the_world"]["mean"] == 0.2
    assert written["torch"]["ratios"] == {}
    assert written["layers_per_s"]["zigzag"] == 1.2
    assert written["repetitions"] == 3
    assert len(written["runs"]) == 5
    assert (written["tokens_identical"], written["mock_tokens_identical"]) == (False, True)
    assert written["machine"]["cores"] >= 1


def test_one_engine_alone_has_a_document_too() -> None:
    assert document([RESULT], machine={}, command="")["tokens_identical"] is True
    torch = document([result(run(ZIGZAG, (0.1,) * 4, engine="torch"), engine="torch")], machine={}, command="")
    assert torch["torch"]["tokens_identical"] is torch["tokens_identical"] is True
    assert "modes" not in torch


def test_the_table_has_the_deviations_and_the_aims() -> None:
    console = Console(record=True, width=120)
    table.show(RESULT, console)
    shown = console.export_text()
    assert f"{RESULT.deviation(ZIGZAG, 'mean_s', 'planned'):+.1%}" in shown
    assert "aim: at least 1.8" in shown
    assert "zigzag over stop_the_world: mean 0.200" in shown
    assert "outputs as of an idle instance: 20 of 20" in shown


def test_without_pairs_there_is_nothing_to_aim_at() -> None:
    console = Console(record=True, width=120)
    table.show(result(run(PLAIN, STOP[0])), console)
    assert "times one instance" not in console.export_text()
