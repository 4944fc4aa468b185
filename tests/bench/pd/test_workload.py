"""What ``bench pd`` asks."""

from __future__ import annotations

import pytest

from bench.pd.burst import Burst
from bench.pd.workload import KV_SHARE, Model, Setting, link_gbps, make_arrivals
from shared.errors import BadRequest


def test_one_seed_asks_the_same_and_another_something_else() -> None:
    assert make_arrivals(Setting()) == make_arrivals(Setting())
    assert make_arrivals(Setting()) != make_arrivals(Setting(seed=1))
    assert Burst().arrivals() == Burst().arrivals()


def test_both_kinds_arrive_in_the_order_of_time() -> None:
    arrivals = make_arrivals(Setting(seconds=60))
    assert [a.at_s for a in arrivals] == sorted(a.at_s for a in arrivals)
    assert [a.number for a in arrivals] == list(range(len(arrivals)))
    long = [a for a in arrivals if a.long]
    assert 0 < len(long) < len(arrivals)
    assert all(1600 <= len(a.prompt) <= 2400 for a in long)


def test_a_burst_asks_for_more_after_its_quiet_beginning() -> None:
    burst = Burst()
    quiet = sum(a.at_s < burst.quiet_s for a in burst.arrivals())
    assert len(burst.arrivals()) - quiet > 3 * quiet


def test_the_link_keeps_the_proportion_of_the_named_case() -> None:
    model = Model()
    gbps = link_gbps(model, model.tokens_per_s, KV_SHARE)
    per_token_s = model.kv_bytes_per_token * 8 / gbps / 1e9
    assert per_token_s * model.tokens_per_s == pytest.approx(KV_SHARE)
    # Llama-3-8B: 128 KiB of KV per token, 10,000 prompt tokens per second, 100 Gbit/s.
    assert pytest.approx(128 * 1024 * 8 / 100e9 * 10_000, abs=1e-3) == KV_SHARE


@pytest.mark.parametrize("wrong", [{"workers": 3}, {"workers": 0}, {"seconds": 0.0}, {"long_per_s": -1.0}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadRequest):
        Setting(**wrong)  # type: ignore[arg-type]
