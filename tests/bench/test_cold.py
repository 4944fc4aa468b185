from __future__ import annotations

from bench.cold import BURSTS, SITUATIONS, Burst, Row, lengths
from bench.streamed import Streamed


def test_no_prompt_has_the_length_of_one_before_and_the_last_burst_is_hardly_longer_than_the_first() -> None:
    for size in (1, 2, 10):
        bursts = [lengths(burst, size) for burst in range(BURSTS)]
        assert len({length for burst in bursts for length in burst}) == BURSTS * size
        assert sum(bursts[-1]) - sum(bursts[0]) < BURSTS * size


def test_waiting_for_an_instance_is_not_counted() -> None:
    streams = (Streamed(0, "", (3.0, 3.5), sent_s=100.0), Streamed(1, "", (1.5,), sent_s=102.5), Streamed(2, "", ()))
    assert Burst.of(streams) == Burst((3.0, 1.5), (0.5,))
    assert Burst.of(streams, since_s=102.0) == Burst((1.0, 1.5), (0.5,))


def test_the_first_burst_is_compared_with_the_last_one_and_with_all_that_came_later() -> None:
    bursts = (Burst((0.4, 0.8), (0.03,)), Burst((0.1,), (0.01,)), Burst((0.2,), (0.02,)), Burst((0.3,), (0.01,)))
    found = Row(SITUATIONS[0], 2, bursts, ("503: full", "503: full")).document()
    assert (found["ttft_mean_of_tenth"], found["ttft_max_of_tenth"]) == (2.0, 2.67)
    assert (found["ttft_mean_of_later"], found["gap_mean_of_later"]) == (3.0, 3.0)
    assert found["ttft_max_ms"] == [800.0, 100.0, 200.0, 300.0]
    assert (found["failed"], found["errors"]) == (2, ["503: full"])


def test_a_burst_without_an_answer_has_no_ratio() -> None:
    found = Row("fresh", 1, (Burst((), ()),) * BURSTS, ("gone",)).document()
    assert found["ttft_mean_of_tenth"] is None
    assert found["failed"] == 1
