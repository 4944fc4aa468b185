from __future__ import annotations

import msgspec
import pytest

from compose.cli.scale import COLUMNS, MAX_BATCHES, pair_lines, sparkline
from shared.messages.operations import LiveBatchRecord, LiveRecord

PAIR = LiveRecord(
    pair_id="p-1/0",
    source="worker-0",
    target="worker-1",
    policy="zigzag",
    why="worker-1 is a tail that has all layers in 2.125 s; i-0 has 1.500 s of queue and 0.500 s of slack",
    outcome="dissolved",
    reason="the target has everything",
    started_ms=12.25,
    ended_ms=812.5,
    first_cooperative_token_ms=130.75,
    batches=(
        LiveBatchRecord(
            batch_id="b0", num_requests=2, num_tokens=512, target_layers=3, source_layers=5, first_token_ms=130.75
        ),
        LiveBatchRecord(
            batch_id="b1", num_requests=1, num_tokens=9, target_layers=8, source_layers=0, first_token_ms=-1e12
        ),
    ),
    source_layers=(4, 8, 0),
    target_layers=(0, 1, 2, 8),
    tokens=(0, 3),
)


def words(pair: LiveRecord, encoding: str = "utf-8") -> list[str]:
    return [" ".join(line.split()) for line in pair_lines([pair], encoding=encoding)]


def test_a_pair_says_who_why_and_when() -> None:
    found = words(PAIR)
    for line in (
        "live 1 of 1: worker-0 (source) with worker-1 (target)",
        "policy zigzag",
        "outcome dissolved: the target has everything",
        "started_ms 12.2",
        "first_cooperative_token_ms 130.8",
        "ended_ms 812.5",
        "batches 2",
        "1 2 512 3 5 130.8",
        "2 1 9 8 0 -",
    ):
        assert line in found
    assert PAIR.why in " ".join(found)


def test_the_timelines_have_one_scale_for_both_sides() -> None:
    lines = list(pair_lines([PAIR]))
    assert [line.partition("|")[2] for line in lines if "per 50 ms" in line] == [
        " ▁▂█| max 8",
        "▄█  | max 8",
        " █  | max 3",
    ]


def test_a_pair_that_has_not_ended_and_did_nothing_is_short() -> None:
    pair = LiveRecord(pair_id="p", source="a", target="b", policy="best_effort", why="asked for")
    assert words(pair) == [
        "", "live 1 of 1: a (source) with b (target)", "policy best_effort", "why asked for", "outcome running",
        "started_ms -", "first_cooperative_token_ms -", "ended_ms -", "batches 0",
    ]  # fmt: skip


def test_many_batches_and_buckets_stay_readable() -> None:
    batch = PAIR.batches[0]
    many = msgspec.structs.replace(
        PAIR,
        why="because " * 40,
        reason="and so " * 40,
        batches=tuple(msgspec.structs.replace(batch, num_tokens=n) for n in range(100_000, 100_040)),
        source_layers=(1,) * 1000,
        target_layers=(7,) * 999,
    )
    lines = list(pair_lines([many, many]))
    assert max(map(len, lines)) <= COLUMNS
    found = [" ".join(line.split()) for line in lines]
    assert f"and {40 - MAX_BATCHES} more; --json has all" in found
    assert found.count("12 2 100011 3 5 130.8") == 2
    assert not any(line.startswith("13 ") for line in found)
    # 20 buckets per bar: the last one of the target's is a bucket short.
    assert sum("target layers per 1000 ms" in line and "| max 140" in line for line in lines) == 2
    assert len(lines) < 2 * 40


def test_every_count_above_zero_is_seen() -> None:
    assert sparkline((0, 1, 500, 1000), 1000) == " ▁▄█"
    assert sparkline((0, 0), 0) == "  "


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "no-such-encoding"])
def test_a_terminal_without_block_characters_gets_others(encoding: str) -> None:
    assert all(line.isascii() for line in pair_lines([PAIR], encoding=encoding))
