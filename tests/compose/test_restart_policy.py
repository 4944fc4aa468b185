from __future__ import annotations

from compose.restart_policy import RestartCounter, RestartPolicy

POLICY = RestartPolicy(first_delay_s=1.0, max_delay_s=4.0, stable_s=10.0, max_failed_starts=5)


def dies(counter: RestartCounter, *, ready: bool = False, lived_s: float = 0.1) -> float | None:
    return counter.delay_after_death(lived_s=lived_s, was_ready=ready)


def test_delays_grow_up_to_a_limit_and_one_that_never_is_ready_is_given_up() -> None:
    counter = RestartCounter(POLICY)
    assert [dies(counter) for _ in range(5)] == [1.0, 2.0, 4.0, 4.0, None]
    assert counter.num_restarts == 4


def test_one_that_was_ready_is_started_again_as_often_as_it_dies() -> None:
    counter = RestartCounter(POLICY)
    assert [dies(counter, ready=True) for _ in range(5)] == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert {dies(counter, ready=True) for _ in range(5000)} == {4.0}


def test_starts_that_failed_count_in_a_row_only() -> None:
    counter = RestartCounter(POLICY)
    for _ in range(10):
        assert [dies(counter) for _ in range(4)].count(None) == 0
        assert dies(counter, ready=True) is not None
    assert [dies(counter) for _ in range(5)][-1] is None


def test_one_that_takes_long_to_fail_is_given_up_as_well() -> None:
    counter = RestartCounter(POLICY)
    assert [dies(counter, lived_s=60.0) for _ in range(5)] == [1.0, 1.0, 1.0, 1.0, None]


def test_a_process_that_lived_long_starts_a_new_series() -> None:
    counter = RestartCounter(POLICY)
    for _ in range(4):
        dies(counter, ready=True)
    assert dies(counter, ready=True, lived_s=11.0) == 1.0
    assert [dies(counter, ready=True) for _ in range(2)] == [1.0, 2.0]


def test_deaths_on_purpose_never_lead_to_giving_up() -> None:
    counter = RestartCounter(POLICY)
    died = {counter.delay_after_death(lived_s=0.1, was_ready=False, deliberate=True) for _ in range(20)}
    assert died == {1.0}
