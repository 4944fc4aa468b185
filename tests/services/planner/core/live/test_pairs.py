"""Who scales live with whom."""

from __future__ import annotations

import pytest

from services.planner.core.live.pairs import Selection, SourceCandidate, num_sources, select_pairs
from services.planner.core.multicast.chains import plan_worker_chains
from services.planner.core.multicast.explain import MAX_NAMES
from shared.messages.common import LiveChoice
from tests.services.planner.core.multicast.clusters import MODEL_BYTES, cluster, record

TAILS = {"c": 1.0, "d": 4.0}
"""d's network card is slower, so it finishes last."""


def ends(selection: Selection) -> list[tuple[str, str]]:
    return [(pair.source, pair.target) for pair in selection.pairs]


def test_the_slowest_tail_goes_to_the_longest_queue() -> None:
    selection = select_pairs([SourceCandidate("x", 2.0, 0.01), SourceCandidate("y", 3.0, 0.01)], TAILS)
    assert ends(selection) == [("y", "d"), ("x", "c")]
    assert "d is a tail" in selection.pairs[0].why
    assert selection.declined == ()


def test_only_a_tail_that_would_be_late_goes_live() -> None:
    selection = select_pairs([SourceCandidate("x", 9.0, 2.5), SourceCandidate("y", 8.0, 2.5)], TAILS)
    assert ends(selection) == [("x", "d")]
    assert "stop-the-world meets the SLO" in selection.declined[0]
    with_margin = select_pairs([SourceCandidate("y", 8.0, 2.5)], {"c": 1.0}, margin_s=2.5)
    assert ends(with_margin) == [("y", "c")]


def test_an_instance_that_is_not_overloaded_needs_no_partner() -> None:
    selection = select_pairs([SourceCandidate("x", 0.5, 0.6)], TAILS)
    assert selection.pairs == ()
    assert "not overloaded" in selection.declined[0]


def test_a_tail_that_nobody_needs_may_go_to_what_is_computed_within_its_slack() -> None:
    """More arrives while it loads, and gateways send it to whoever has less."""
    within = [SourceCandidate("y", 0.2, 0.3), SourceCandidate("x", 0.8, 0.3), SourceCandidate("z", 0.0, 0.3)]
    selection = select_pairs(within, TAILS, share_left=True)
    assert ends(selection) == [("x", "d"), ("y", "c")], "who is overloaded goes first"
    assert selection.declined == ("z: nothing waits",)
    assert num_sources(within) == 1, "no chain is begun for others"
    none_left = select_pairs(within, {"d": 4.0}, share_left=True)
    assert ends(none_left) == [("x", "d")]
    assert any(line.startswith("y: not overloaded") for line in none_left.declined)


@pytest.mark.parametrize("source", [SourceCandidate("y", 0.2, 5.0), SourceCandidate("y", 0.2, 0.3, lacks_kv=True)])
def test_but_not_where_loading_first_is_in_time_or_what_waits_lacks_kv(source: SourceCandidate) -> None:
    assert select_pairs([source], TAILS, share_left=True).pairs == ()


def test_an_instance_where_nothing_waits_needs_no_partner_however_long_a_prompt_takes() -> None:
    selection = select_pairs([SourceCandidate("x", 0.0, -1.0)], TAILS)
    assert selection == Selection((), ("x: nothing waits",))


def test_an_instance_is_in_one_pair_and_a_tail_too() -> None:
    sources = [
        SourceCandidate("x", 3.0, 0.0, live=True),
        SourceCandidate("y", 2.0, 0.0),
        SourceCandidate("z", 1.0, 0.0),
    ]
    selection = select_pairs(sources, {"c": 1.0})
    assert ends(selection) == [("y", "c")]
    assert [reason.split(":")[0] for reason in selection.declined] == ["x", "z"]


def test_a_tail_of_which_nobody_knows_when_it_is_done_counts_as_the_slowest() -> None:
    selection = select_pairs([SourceCandidate("x", 9.0, 8.0)], {"c": 1.0, "e": 0.0})
    assert ends(selection) == [("x", "e")]
    assert "nobody knows when" in selection.pairs[0].why


def test_always_asks_neither_for_overload_nor_for_lateness() -> None:
    idle = [SourceCandidate("x", 0.0, 9.0), SourceCandidate("y", 0.1, 9.0), SourceCandidate("z", 5.0, 0.0, live=True)]
    selection = select_pairs(idle, TAILS, choice="always")
    assert ends(selection) == [("y", "d"), ("x", "c")]
    assert [pair.why for pair in selection.pairs] == [
        "d helps y (asked for); d is expected to have all layers in 4.000 s; y has 0.100 s of queue and 9.000 s of "
        "slack",
        "c helps x (asked for); c is expected to have all layers in 1.000 s",
    ]
    assert ["in a pair already" in line for line in selection.declined] == [True]


def test_what_was_asked_for_and_cannot_be_is_said() -> None:
    (pair,) = select_pairs([SourceCandidate("x", 0.0, 1.0)], {"c": 0.0}, choice="always").pairs
    assert pair.why == "c helps x (asked for); nobody knows when c has all layers"
    nobody = select_pairs([], TAILS, choice="always")
    assert nobody.explain == ("not live: no instance serves that could be a source",)
    assert select_pairs([], TAILS).explain == ()


def test_never_makes_no_pairs_and_gives_no_reasons() -> None:
    assert select_pairs([SourceCandidate("x", 9.0, 0.0)], TAILS, choice="never") == Selection((), ())


@pytest.mark.parametrize(("choice", "wanted"), [("auto", 1), ("always", 2), ("never", 0)])
def test_so_many_tails_are_of_use(choice: LiveChoice, wanted: int) -> None:
    sources = [
        SourceCandidate("x", 9.0, 0.0),
        SourceCandidate("y", 0.0, 1.0),
        SourceCandidate("z", 9.0, 0.0, live=True),
    ]
    assert num_sources(sources, choice) == wanted


def test_the_explanation_of_many_instances_is_cut() -> None:
    selection = select_pairs([SourceCandidate(f"i{i:03}", 9.0, 0.0) for i in range(100)], TAILS)
    lines = selection.explain
    assert [line.startswith("live: ") for line in lines[:3]] == [True, True, False]
    assert lines[-1] == f"not live: and {98 - MAX_NAMES} more instances"
    assert len(lines) == 2 + MAX_NAMES + 1
    pairs = select_pairs(
        [SourceCandidate(f"i{i:03}", 9.0, 0.0) for i in range(60)], {f"t{i:03}": 1.0 for i in range(60)}
    )
    assert pairs.explain[-1] == "live: and 10 more pairs in the same way"


def test_the_tails_of_planned_chains_are_paired() -> None:
    found = cluster(record("a", "serving"), record("b", "serving"), record("c"), record("d"))
    assert plan_worker_chains(found, 2, MODEL_BYTES).tails == ("d",)
    planned = plan_worker_chains(found, 2, MODEL_BYTES, tails=2)
    finish_s = planned.predicted_s
    selection = select_pairs(
        [SourceCandidate("i-a", 9.0, 0.0), SourceCandidate("i-b", 8.0, 0.0)], {t: finish_s[t] for t in planned.tails}
    )
    assert sorted(pair.target for pair in selection.pairs) == ["c", "d"]
