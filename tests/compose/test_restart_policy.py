from __future__ import annotations

from compose.restart_policy import RestartCounter, RestartPolicy

POLICY = RestartPolicy(first_delay_s=1.0, max_delay_s=4.0, stable_s=10.0, max_young_deaths=5)


def test_delays_grow_up_to_a_limit_and_then_it_is_given_up() -> None:
    counter = RestartCounter(POLICY)
    assert [counter.delay_after_death(lived_s=0.1) for _ in range(5)] == [1.0, 2.0, 4.0, 4.0, None]
    assert counter.num_restarts == 4


def test_a_process_that_lived_long_starts_a_new_series() -> None:
    counter = RestartCounter(POLICY)
    for _ in range(4):
        counter.delay_after_death(lived_s=0.1)
    assert counter.delay_after_death(lived_s=11.0) == 1.0
    assert counter.delay_after_death(lived_s=0.1) == 1.0


def test_deaths_on_purpose_never_lead_to_giving_up() -> None:
    counter = RestartCounter(POLICY)
    assert {counter.delay_after_death(lived_s=0.1, deliberate=True) for _ in range(20)} == {1.0}
