"""Which runs an evaluation asks for: against a cluster that says at once how it would have gone."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from bench.evaluate.measure import Evaluation, Outcome, Setting, attainable
from bench.evaluate.models import find_model
from bench.evaluate.saved_run import Plan, Runs, SavedRun
from bench.evaluate.windows import choose
from bench.lab.errors import LabFailed
from bench.replay.document import Document
from bench.replay.objectives import Attainment, Slo
from bench.replay.observations import InstancePoint
from bench.systems import System, find
from bench.traces.request import Trace
from bench.traces.synthetic import synthesise
from tests.bench.evaluate.runs import run
from tests.bench.replay.documents import document


class Cluster:
    """``static-full`` holds up to ``carries`` times the rate, six prefill and two decode instances twice as much.
    ``blitz`` has 5.3 instances on average."""

    def __init__(self, carries: float = 0.7, *, void_at: float = 1e9) -> None:
        self.carries = carries
        self.void_at = void_at
        self.plans: list[Plan] = []
        self.simulated_plans: list[Plan] = []

    async def run(self, system: System, plan: Plan, trace: Trace) -> SavedRun:
        self.plans.append(plan)
        return self._run(system, plan)

    def simulated(self, system: System, plan: Plan, trace: Trace) -> Document:
        self.simulated_plans.append(plan)
        return self._run(system, plan).document

    def _run(self, system: System, plan: Plan) -> SavedRun:
        assert system.name == plan.system
        carried = self.carries * (2.0 - abs(plan.instances.get("prefill", 0) - 6) / 4)
        share = min(1.0, carried / plan.scale_rate)
        base = document()
        assert base.cluster is not None
        # The last request is due after 2.4 s, and 30 % of them.
        instances = (InstancePoint(0.0, {"prefill/serving": 5}), InstancePoint(0.7 * 2.4, {"prefill/serving": 6}))
        changes: dict[str, Any] = {
            "slo": Attainment(0.45, 0.15, 1, share, 1.0, 1.0, 1.0),
            "cluster": replace(base.cluster, instances=instances),
        }
        if plan.scale_rate >= self.void_at:
            changes["void"] = ("late",)
        return run(plan, found=msgspec.structs.replace(base, **changes))

    def asked(self, purpose: str) -> list[str]:
        return [plan.name for plan in self.plans if plan.purpose == purpose]


@cache
def _trace() -> Trace:
    return synthesise("burstgpt", seed=1, duration_s=400)


def _setting(*systems: str, scale: float | Literal["half"] = 1.0, windows: int = 2, repetitions: int = 2) -> Setting:
    trace = _trace()
    return Setting(
        trace=trace,
        spread_seconds=False,
        model=find_model("llama3-8b"),
        systems=tuple(find(name) for name in systems),
        windows=choose(trace, windows),
        scale=scale,
        repetitions=repetitions,
        seed=0,
        workers=8,
        nic_gbps=0.25,
        lead_in_s=10.0,
        give_back_s=2.5,
        search="lab",
    )


async def _evaluate(cluster: Cluster, setting: Setting, folder: Path, said: list[str] | None = None) -> Outcome:
    say = (said if said is not None else []).append
    return await Evaluation(setting, cluster.run, cluster.simulated, Runs(folder), say).run()


async def test_each_system_once_for_each_window_and_repetition(tmp_path: Path) -> None:
    cluster = Cluster()
    outcome = await _evaluate(cluster, _setting("blitz", "sllm"), tmp_path)
    assert len(cluster.asked("measured")) == len(set(cluster.asked("measured"))) == 8
    assert not cluster.asked("tuning")
    assert [[sorted(runs) for runs in windows] for windows in outcome.runs] == [[["blitz", "sllm"]] * 2] * 2
    # All systems get the same arrivals, and every window others.
    assert len({plan.digest for plan in cluster.plans}) == 2


async def test_what_is_finished_is_not_measured_again(tmp_path: Path) -> None:
    setting = _setting("blitz", "static-full", repetitions=1)
    before = await _evaluate(Cluster(), setting, tmp_path)
    Runs(tmp_path).file(before.runs[0][0]["blitz"].plan).unlink()
    cluster, said = Cluster(), list[str]()
    after = await _evaluate(cluster, setting, tmp_path, said)
    assert len(cluster.plans) == 1
    assert sum("there already" in line for line in said) >= 5
    assert after.found == before.found


async def test_half_the_highest_rate_in_the_best_split(tmp_path: Path) -> None:
    cluster = Cluster(carries=0.7)
    outcome = await _evaluate(cluster, _setting("blitz", "static-full", scale="half", windows=1), tmp_path)
    found = outcome.found
    assert found.highest is not None
    assert 1.4 / 1.1 < found.highest <= 1.4
    assert found.scale_rate == found.highest / 2
    assert not found.limited_by_machine
    assert found.splits == {"static-full": {"prefill": 6, "decode": 2}}
    assert {plan.scale_rate for plan in cluster.plans if plan.purpose == "measured"} == {found.scale_rate}
    assert len(found.steps) == len(cluster.asked("tuning")) <= 16


async def test_a_simulated_search_needs_no_run_in_the_lab(tmp_path: Path) -> None:
    cluster = Cluster(carries=0.7)
    setting = replace(_setting("blitz", "static-full", scale="half", windows=1), search="simulated")
    found = (await _evaluate(cluster, setting, tmp_path)).found
    assert found == (await _evaluate(Cluster(carries=0.7), replace(setting, search="lab"), tmp_path / "lab")).found
    assert cluster.simulated_plans
    assert not cluster.asked("tuning")


async def test_of_the_traces_that_a_search_scales_only_the_last_is_kept(tmp_path: Path) -> None:
    class Counting(Cluster):
        async def run(self, system: System, plan: Plan, trace: Trace) -> SavedRun:
            self.alive = sum(isinstance(one, Trace) and one.name == trace.name for one in gc.get_objects())
            return await super().run(system, plan, trace)

    cluster = Counting(carries=0.7)
    setting = replace(_setting("blitz", "static-full", scale="half", windows=1, repetitions=1), search="simulated")
    named = replace(setting.trace, name="counted")
    await _evaluate(cluster, replace(setting, trace=named), tmp_path)
    assert len({plan.scale_rate for plan in cluster.simulated_plans}) > 5
    # It, the one that is scaled, and one that the thread of a simulation may still hold.
    assert cluster.alive <= 3


async def test_a_search_that_the_machine_ends_says_so(tmp_path: Path) -> None:
    outcome = await _evaluate(Cluster(10.0, void_at=1.5), _setting("blitz", scale="half", windows=1), tmp_path)
    assert outcome.found.limited_by_machine
    assert outcome.found.highest is not None
    assert outcome.found.highest < 1.5


async def test_a_cluster_that_carries_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabFailed, match="no rate"):
        await _evaluate(Cluster(0.0), _setting("blitz", scale="half", windows=1), tmp_path)


async def test_a_window_without_a_prompt_that_can_be_in_time_is_named_before_anything_runs(tmp_path: Path) -> None:
    setting = _setting("blitz", scale="half", windows=1)
    long = tuple([replace(request, input_tokens=9000) for request in setting.trace.requests])
    cluster = Cluster()
    with pytest.raises(LabFailed, match="no rate to take half of"):
        await _evaluate(cluster, replace(setting, trace=replace(setting.trace, requests=long)), tmp_path)
    assert not cluster.plans


def test_prompts_that_are_too_long_even_alone_do_not_count() -> None:
    model = find_model("llama3-8b")
    assert attainable(model.profile(), model.slo, [1000, 2000, 3000, 7400]) == 0.75
    assert attainable(model.profile(), Slo(None, 0.1), [7400]) == 1.0


async def test_half_has_the_average_number_of_its_repetition(tmp_path: Path) -> None:
    cluster = Cluster()
    await _evaluate(cluster, _setting("blitz", "static-half", "static-full"), tmp_path)
    sizes = {sum(plan.instances.values()) for plan in cluster.plans if plan.system == "static-half"}
    assert sizes == {5}


async def test_a_void_run_is_repeated_once(tmp_path: Path) -> None:
    cluster = Cluster(void_at=1.0)
    outcome = await _evaluate(cluster, _setting("blitz", windows=1, repetitions=1), tmp_path)
    assert len(cluster.plans) == 2
    saved = outcome.runs[0][0]["blitz"]
    assert saved.attempts == 2
    assert saved.document.void == ("late",)
    await _evaluate(cluster, _setting("blitz", windows=1, repetitions=1), tmp_path)
    assert len(cluster.plans) == 2
