from __future__ import annotations

from bench.replay.figures import log_ticks, panels, table, time_ticks
from tests.bench.replay.documents import document


def test_a_cluster_adds_a_row() -> None:
    assert [len(row) for row in panels([document()])] == [3, 3, 3]
    assert [len(row) for row in panels([document(with_cluster=False)])] == [3, 3]
    assert [len(row) for row in panels([document(), document(with_cluster=False)])] == [3, 3, 3]


def test_one_system_shows_its_roles_and_states_and_several_their_sums() -> None:
    gpus = panels([document()])[2][0]
    assert [curve.label for curve in gpus.curves] == ["prefill, serving", "prefill, loading", "decode, serving"]
    assert {curve.x for curve in gpus.curves} == {(0.0, 1.0, 3.0, 3.0)}
    several = panels([document("a"), document("b")])[2][0]
    assert [(curve.label, curve.y) for curve in several.curves] == [(n, (1.0, 2.0, 2.0, 2.0)) for n in ("a", "b")]


def test_what_the_network_carried_is_a_rate_for_one_and_a_sum_for_several() -> None:
    one = panels([document()])[2][2]
    assert one.title == "Sent over the network"
    assert next(c for c in one.curves if c.label == "weights").y == (0.008, 0.008)
    several = panels([document("a"), document("b")])[2][2]
    assert [bar.value for bar in several.bars if bar.group == "weights"] == [3.0, 3.0]


def test_distributions_show_an_objective_that_all_share() -> None:
    assert [panel.limit for panel in panels([document()])[1][:2]] == [250.0, 100.0]


def test_the_rate_is_drawn_once_for_the_same_arrivals() -> None:
    assert [curve.label for curve in panels([document("a"), document("b")])[0][0].curves] == ["arrivals"]


def test_the_table_leaves_out_what_nobody_has() -> None:
    rows = dict(table([document("a"), document("b", with_cluster=False)]))
    assert rows["requests completed"] == ["3 of 4", "3 of 4"]
    assert rows["failed"] == ["1 connect", "1 connect"]
    assert rows["GPU seconds"] == ["5.0", ""]
    assert "unfinished" not in rows


def test_time_is_told_in_minutes_and_seconds() -> None:
    assert time_ticks(300) == [(60 * n, f"{n}:00") for n in range(6)]
    assert time_ticks(3.5) == [(0, "0:00"), (1, "0:01"), (2, "0:02"), (3, "0:03")]
    assert len(time_ticks(100_000)) <= 8


def test_a_short_logarithmic_axis_names_more_places() -> None:
    assert log_ticks(18, 750) == [(20, "20"), (50, "50"), (100, "100"), (200, "200"), (500, "500")]
    assert [name for _, name in log_ticks(2300, 3700)] == ["2,500", "2,750", "3,000", "3,500"]
    assert [name for _, name in log_ticks(0.05, 20_000)] == ["0.1", "1", "10", "100", "1,000", "10,000"]
