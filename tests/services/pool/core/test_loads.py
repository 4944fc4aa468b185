from __future__ import annotations

from services.pool.core.loads import LoadLimits, Loads, nic_between
from tests.records import worker

A, B = worker("a", host="x", nic="n0"), worker("b", host="y")


def test_a_copy_takes_a_place_in_total_on_its_host_and_on_the_nic_that_sends_it_until_it_ends() -> None:
    loads = Loads(LoadLimits(total=2, per_host=1, per_nic=1))
    loads.begin(("b", "m"), "y", nic_between(A, B))
    assert (loads.is_full, loads.host_is_full("y"), loads.host_is_full("x")) == (False, True, False)
    assert (loads.is_busy(A, B), loads.is_busy(B, A)) == (True, False)
    loads.begin(("b", "n"), "y", None)
    assert (len(loads), loads.is_full) == (2, True)
    loads.end(("b", "m"))
    loads.end(("b", "m"))
    assert (len(loads), loads.is_full, loads.host_is_full("y"), loads.is_busy(A, B)) == (1, False, True, False)


def test_a_load_that_is_seen_again_is_the_same_and_keeps_its_nic() -> None:
    loads = Loads(LoadLimits(per_nic=1))
    loads.begin(("b", "m"), "y", nic_between(A, B))
    loads.begin(("b", "m"), "y", None)
    assert (len(loads), loads.is_busy(A, B)) == (1, True)


def test_nics_of_a_host_are_counted_apart_and_none_is_needed_within_a_host() -> None:
    loads = Loads(LoadLimits(per_nic=1))
    other = worker("c", host="x", nic="n1")
    near = worker("d", host="x", nic="n0")
    loads.begin(("b", "m"), "y", nic_between(A, B))
    assert [loads.is_busy(source, B) for source in (A, other, near)] == [True, False, True]
    assert not loads.is_busy(A, near)
    assert nic_between(A, near) is None
