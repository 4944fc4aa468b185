"""A sweep: systems on the same requests in every setting of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from bench.replay.objectives import Slo
from bench.sim.evaluation import Evaluation, Evaluator, span_s
from bench.sim.frontier import Answer, Needed, Point, answer, marked, needed, percent
from bench.sim.run_result import Figures, figures
from bench.sim.search import ATTAINED
from bench.sim.setup import Setup
from bench.sim.what_if import Setting, exact
from bench.systems import System
from shared.errors import BadRequest

PayFor = Literal["used", "all"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What counts as good, and as cheap."""

    slo_attainment: float = ATTAINED
    """Share of the requests that are to be within the absolute objectives."""
    pay_for: PayFor = "used"
    """GPUs that hold an instance, or all GPUs of the cluster, from the first arrival to the last."""
    gpu_hour_price: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.slo_attainment <= 1:
            raise BadRequest(
                f"--slo-attainment is a share of the requests, above 0 and up to 1, not {self.slo_attainment!r}",
                param="slo-attainment",
            )
        if self.gpu_hour_price is not None and not 0 < self.gpu_hour_price < float("inf"):
            raise BadRequest(
                f"--gpu-hour-price is a positive number, not {self.gpu_hour_price!r}", param="gpu-hour-price"
            )


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep came to. Its keys stand beside those of the evaluation of the cluster as it is."""

    what_if: tuple[Point, ...]
    what_if_answers: dict[str, Answer]
    """By system, whatever the time that it keeps copies."""
    what_if_needed: tuple[Needed, ...]
    """What systems cost that are equally good; of the requests within reach, if more are asked for."""
    what_if_terms: Terms
    what_if_slo: Slo
    """The absolute objectives."""
    what_if_within_reach: float
    """Share of the requests whose prompt an idle instance computes in time: no more can be within the objectives."""
    what_if_left_out: int
    """Settings that had not finished when the sweep was interrupted."""

    @property
    def lines(self) -> list[str]:
        """The answers."""
        slo, share = self.what_if_slo, self.what_if_terms.slo_attainment
        assert slo.ttft_s is not None
        assert slo.tbt_s is not None
        objectives = f"{slo.ttft_s * 1000:g} ms to the first token, {slo.tbt_s * 1000:g} ms between tokens"
        said = [f"objectives: {objectives}, for {percent(share)} of the requests"]
        said += [found.text for found in self.what_if_answers.values()]
        if len(self.what_if_answers) > 1:
            # What is asked for; and where not all that scale get there, as much of it as all of them do.
            scaling = {point.system for point in self.what_if if point.give_back_s is not None}
            asked = [one for one in self.what_if_needed if one.level <= share]
            all_do = [one for one in asked if all(one.points[name] is not None for name in scaling)]
            said += dict.fromkeys(one.text for one in (asked[-1], *all_do[-1:]))
        if self.what_if_within_reach < share and not all(found.met for found in self.what_if_answers.values()):
            said.append(
                f"an idle instance computes {self.what_if_within_reach:.2%} of the prompts in time: more hosts or "
                "faster links keep the objectives for no more"
            )
        return said


def sweep(
    evaluator: Evaluator, settings: Sequence[Setting], terms: Terms, base: Evaluation, systems: Sequence[System]
) -> WhatIf:
    """Every setting, at the rate of ``base`` and judged by its relative objectives. What ``base`` has of ``systems`` is
    not simulated again. After Ctrl-C: the settings that have finished by then."""
    requests = evaluator.requests(base.scale_rate)
    relative = Slo(base.slo_ttft_s, base.slo_tbt_s)
    known = {exact(system).name: base.systems[system.name] for system in systems if system.name in base.systems}
    span = span_s(requests)
    points: list[Point] = []
    setup = evaluator.setup
    evaluators = {(setup.cluster, setup.give_back_s): evaluator}
    try:
        for number, setting in enumerate(settings, 1):
            give_back_s = setup.give_back_s if setting.give_back_s is None else setting.give_back_s
            here = evaluators.get((setting.cluster, give_back_s))
            if here is None:
                # Splits that were found are kept, as beginnings of other searches; nothing else is.
                other = replace(setup, cluster=setting.cluster, give_back_s=give_back_s)
                here = replace(evaluator, setup=other, say=lambda _line: None)
                evaluators[setting.cluster, give_back_s] = here
            found = known.get(setting.system.name) if here is evaluator else None
            if found is None:
                result, split = here.run(setting.system, requests, base.scale_rate)
                found = figures(result, relative, evaluator.absolute(), split)
            point = _point(setting, here.setup, found, terms, span)
            points.append(point)
            evaluator.say(f"{number} of {len(settings)}: {setting}: {point.slo_attainment_absolute:.2%}, {point.price}")
    except KeyboardInterrupt:
        evaluator.say(f"interrupted: {len(points)} of {len(settings)} settings")
    by_system: dict[str, list[Point]] = {}
    for point in points:
        by_system.setdefault(point.system, []).append(point)
    within_reach = evaluator.within_reach(requests) / len(requests)
    return WhatIf(
        what_if=marked([point for own in by_system.values() for point in own]),
        what_if_answers={name: answer(own, terms.slo_attainment) for name, own in by_system.items()},
        what_if_needed=needed(points, terms.slo_attainment, within_reach),
        what_if_terms=terms,
        what_if_slo=evaluator.absolute(),
        what_if_within_reach=within_reach,
        what_if_left_out=len(settings) - len(points),
    )


def _point(setting: Setting, setup: Setup, found: Figures, terms: Terms, span: float) -> Point:
    num_gpus, scales = setting.cluster.num_gpus, setting.system.scales
    paid = found.gpu_seconds if terms.pay_for == "used" else num_gpus * span
    return Point(
        **msgspec.structs.asdict(found),
        system=setting.family,
        hosts=setting.cluster.hosts,
        num_gpus=num_gpus,
        nic_gbps=setting.cluster.nic_gbps,
        keep_copies=setting.keep_copies,
        give_back_s=setup.give_back_window_s if scales else None,
        give_back_by_rule=scales and setup.give_back_s == 0,
        paid_gpu_seconds=paid,
        cost=paid / 3600 * terms.gpu_hour_price if terms.gpu_hour_price is not None else None,
        keeps_objectives=found.slo_attainment_absolute >= terms.slo_attainment,
    )
