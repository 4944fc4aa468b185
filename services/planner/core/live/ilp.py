"""The integer program over splits, with PuLP and HiGHS in this process (no file, no subprocess).

Per batch i: T(i) layers at the target, s(i) when these are done and the source starts the rest, p(i) when the source is
free for it; x(i) = 1 if the target has a part, z(i) = 1 if it has all. L layers of c(i) each, loaded at R(k).

    minimise sum of s(i) + c(i) (L - T(i))                                 completions
    L z(i) <= T(i) <= L x(i)                                               what x and z mean
    s(i) >= p(i)                                       unless z(i)         the source serves in first-come order
    p(i+1) >= p(i);  p(i+1) >= s(i) + c(i) (L - T(i))   unless z(i)
    s(i) >= R(0) + sum over j <= i of c(j) T(j)        if x(i)             the target has run them all (k = 0)
    s(i) >= R(T(i) - 1) + c(i)                         if x(i)             the last one was loaded (k = T - 1)

Of ``zigzag_bound``'s rows these are the two ends. Between them the bound is convex in k if layers load at an even pace,
so the ends decide but for single layers; the bound itself gives the times that are promised. R is replaced by the line
from above with its average slope, so that T needs no binaries per layer (four per batch took 30 to 280 ms).
"""

from __future__ import annotations

from collections.abc import Sequence

import highspy
import pulp

from services.planner.core.live.bound import Problem, predict

TIME_LIMIT_S = 0.003
"""Of the solver by default. It looks at the clock after its first relaxation, about five milliseconds from the start at
12 batches; a higher limit lengthens the slowest cases, and improves nothing that was measured."""
GAP = 0.002
"""Relative gap at which the solver may stop: a playback decides anyway."""


class _WarmHiGHS(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS that is told a solution to start from, which PuLP does not pass on by itself."""

    def callSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802 (PuLP's name)
        start = highspy.HighsSolution()
        start.col_value = [variable.varValue for variable in lp.variables()]
        lp.solverModel.setSolution(start)
        super().callSolver(lp)

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:  # noqa: N802 (PuLP's name)
        if lp.solverModel.getModelStatus() != highspy.HighsModelStatus.kSolutionLimit:
            status: tuple[int, int] = super().findSolutionValues(lp)
            return status
        # The limit of nodes, which PuLP does not know.
        solution = lp.solverModel.getSolution()
        if not solution.value_valid:
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
        for variable in lp.variables():
            variable.varValue = solution.col_value[variable.index]
        return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible


def improve(
    problem: Problem,
    start: Sequence[int],
    time_limit_s: float,
    *,
    keep_shapes: bool = True,
    max_nodes: int | None = None,
) -> tuple[int, ...] | None:
    """The best split, as far as the program can tell; None: it found none in time.

    ``max_nodes``: of branch and bound, instead of the time limit.
    ``keep_shapes``: what ``start`` gives whole to one side stays there. That takes milliseconds; to choose
    shapes as well takes from tenths of seconds to seconds at 12 batches.
    """
    model = _Model(problem)
    model.start_from(start)
    if keep_shapes:
        model.keep_shapes(start)
    limit = {"timeLimit": time_limit_s} if max_nodes is None else {"mip_max_nodes": max_nodes}
    model.program.solve(_WarmHiGHS(msg=False, gapRel=GAP, threads=1, **limit))
    if model.program.sol_status not in {pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible}:
        return None
    return model.split()


class _Model:
    """The program above."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        costs, layers = problem.costs, problem.num_layers
        num, first = len(costs), problem.loaded_at[0]
        slope = (problem.loaded_at[-1] - first) / (layers - 1) if layers > 1 else 0.0
        line = max([at - slope * (k + 1) for k, at in enumerate(problem.loaded_at)])
        self.program = pulp.LpProblem("split", pulp.LpMinimize)
        new = self.program.add_variable
        self.layers = [new(f"T{i:03}", 0, layers, pulp.LpInteger) for i in range(num)]
        self.starts = [new(f"s{i:03}", 0) for i in range(num)]
        self.frees = [new(f"p{i:03}", problem.source_free_at) for i in range(num)]
        self.parts = [new(f"x{i:03}", 0, 1, pulp.LpInteger) for i in range(num)]
        self.wholes = [new(f"z{i:03}", 0, 1, pulp.LpInteger) for i in range(num)]
        sum_of = pulp.LpAffineExpression
        completions = dict.fromkeys(self.starts, 1.0) | {t: -c for t, c in zip(self.layers, costs, strict=True)}
        self.program += sum_of(completions)
        work = 0.0
        for i, cost in enumerate(costs):
            t, s, p, x, z = self.layers[i], self.starts[i], self.frees[i], self.parts[i], self.wholes[i]
            work += (cost * layers) + problem.pull_time
            # No clock can be later than this: one side runs everything after all layers are loaded.
            horizon = max(problem.source_free_at, problem.loaded_at[-1]) + work
            self.program += sum_of({t: 1, z: -layers}) >= 0
            self.program += sum_of({t: 1, x: -layers}) <= 0
            self.program += sum_of({s: 1, p: -1, z: horizon}) >= 0
            if i + 1 < num:
                after = self.frees[i + 1]
                self.program += sum_of({after: 1, p: -1}) >= 0
                left = {after: 1, s: -1, t: cost, z: horizon + problem.pull_time, x: -problem.pull_time}
                self.program += sum_of(left) >= cost * layers
            self.program += sum_of({s: 1, t: -slope, x: -(line + cost)}) >= 0
            all_run = {s: 1.0, x: -(first + work)} | {self.layers[j]: -costs[j] for j in range(i + 1)}
            self.program += sum_of(all_run) >= -work

    def start_from(self, split: Sequence[int]) -> None:
        """Give every variable its value under ``split``."""
        problem, free = self.problem, self.problem.source_free_at
        for i, (t, completion) in enumerate(zip(split, predict(problem, split), strict=True)):
            whole = t == problem.num_layers
            self.layers[i].varValue = t
            self.starts[i].varValue = completion - problem.costs[i] * (problem.num_layers - t)
            self.frees[i].varValue = free
            self.parts[i].varValue = int(t > 0)
            self.wholes[i].varValue = int(whole)
            free = free if whole else completion

    def keep_shapes(self, split: Sequence[int]) -> None:
        """Fix x and z to what ``split`` has."""
        for x, z, t in zip(self.parts, self.wholes, split, strict=True):
            x.bounds(int(t > 0), int(t > 0))
            z.bounds(int(t == self.problem.num_layers), int(t == self.problem.num_layers))
            x.cat = z.cat = pulp.LpContinuous

    def split(self) -> tuple[int, ...]:
        """T of the solution."""
        return tuple([min(self.problem.num_layers, max(0, round(t.varValue))) for t in self.layers])
