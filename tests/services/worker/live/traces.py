"""What the members of a pair say to each other, in order, in runs that differ by a seed.

``python -m tests.services.worker.live.traces`` writes down anew what ``golden`` has of them: the two members still
understand each other, but perhaps not those of the version before.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

# isort: off
from tests.moved_clock import moved_time  # before the product, which keeps ``time.monotonic``
# isort: on

from services.worker.core.kv_admission import staging
from services.worker.device.late import LateOrder
from services.worker.live import kv_fetch
from shared import subjects
from shared.messages.common import Ack, LivePolicy, Role
from shared.messages.live import Gate, PlanSplit
from tests.services.worker.live.members import NUM_LAYERS
from tests.services.worker.live.turns import TurnLoop
from tests.services.worker.live.twin import Twins, outcome_of
from tests.services.worker.live.wire import Line

FOLDER = Path(__file__).parent / "golden"
PROMPT_TOKENS = 10, 24
CHUNK_TOKENS = 24
KV_LAYER_BYTES = CHUNK_TOKENS * 64
SPLIT_S = 0.003
"""What the planner takes to compute gates."""
ACT_S = 0.004
"""At most so long after what it is to follow, something happens to a pair."""
SOURCE, TARGET, DECODER = 0, 1, 2

When = Callable[[Line], bool]
Act = Callable[[Twins, Line], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is particular in some runs."""

    seeds: tuple[int, ...] = (1, 2, 3)
    policy: LivePolicy = "zigzag"
    role: Role = "colocated"
    num_prompts: int = 8
    num_late: int = 2
    """Arrive while there is a pair."""
    max_tokens: tuple[int, int] = (2, 5)
    layer_s: tuple[float, float] = (0.004, 0.024)
    """Until another one is loaded."""
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS
    source_blocks: int = 256
    target_blocks: int = 256
    piece_layers: int = 0
    """KV comes in pieces of so many layers of a whole batch, two at a time; 0: whole."""
    gates: tuple[int, ...] = ()
    """One of these is each batch's; none: there is no split."""
    planned: float = 0.0
    """Layers were to take so many times as long as they do; 0: nothing was planned."""
    silence_s: float = 1.5
    """After which a member is lost."""
    lost_answers: float = 0.0
    lost_tensors: float = 0.0
    """A share of all."""
    when: When | None = None
    act: Act = lambda _twins, _line: None
    """Done once, when something is said for the first time of which ``when`` says so."""


def said(who: str, what: str, *fields: str) -> When:
    """This is said, with something in these fields."""

    def when(line: Line) -> bool:
        _, whose, name, content = line
        return (whose, name) == (who, what) and all(content.get(f) for f in fields)

    return when


# --- what happens to a pair --------------------------------------------------------------------


def kill(index: int) -> Act:
    """A member dies."""

    def act(twins: Twins, _: Line) -> None:
        worker = twins.workers[index]
        twins.wire.say(worker.worker_id, "is killed")
        worker.kill()

    return act


def leave(index: int) -> Act:
    """A member cannot go on, and says so."""

    def act(twins: Twins, _: Line) -> None:
        worker = twins.workers[index]
        twins.wire.say(worker.worker_id, "leaves")
        twins.begin(worker.roles.instance_gone(worker.instance, "its engine stops"))

    return act


def fail(index: int, *, later: bool = False) -> Act:
    """A member's engine cannot run the next layer for the pair. ``later``: a late engine, when it comes to that."""

    def act(twins: Twins, _: Line) -> None:
        worker = twins.workers[index]
        twins.wire.say(worker.worker_id, "fails in a layer")
        engine: Any = worker.engine.loop.engine
        engine = engine.watched if later else engine
        run_part = engine.run_part

        def fail_once(*_: object) -> None:
            engine.run_part = run_part
            raise RuntimeError("out of memory")

        engine.run_part = fail_once

    return act


def drain(twins: Twins, _: Line) -> None:
    """The source is to go."""
    twins.wire.say("w0", "drains")
    twins.source.instance.drain()


def cancel(twins: Twins, line: Line) -> None:
    """The client of a request leaves: one of the batch that is spoken of."""
    twins.begin(twins.cancel(next(_requests_of(twins, line[3]))))


def cancel_last(twins: Twins, _: Line) -> None:
    """The client of a request leaves that waits behind all others."""
    twins.begin(twins.cancel(max(twins.requests)))


def cancel_handed(twins: Twins, line: Line) -> None:
    """That of a request leaves which was handed over last."""
    (*_, asked) = [a for a in twins.wire.lines if a[:3] != line[:3] and a[1:3] == ("w0>w1", "hand_over")]
    cancel(twins, asked)


def _requests_of(twins: Twins, content: dict[str, object]) -> Iterator[str]:
    batch_ids = {content.get("batch_id")} | set(content.get("batch_ids", ()))
    claims = {f"pair-claim-{a[3]['serial']}" for a in twins.wire.lines if a[2] == "pull" and "serial" in a[3]}
    for claim_id in claims & set(content.get("claim_ids", ())):
        batch_ids.add(_claimed(twins, claim_id))
    for _, who, what, asked in twins.wire.lines:
        if (who, what) == ("w0>w1", "hand_over") and asked["batch_id"] in batch_ids:
            yield from (request.partition(".")[0] for request in asked["requests"])


def _claimed(twins: Twins, claim_id: str) -> str:
    """The batch that a claim brought."""
    pulls_said = [(who, content) for _, who, what, content in twins.wire.lines if what == "pull"]
    (at,) = [i for i, (who, c) in enumerate(pulls_said) if who == "w0>w1" and c["claim_id"] == claim_id]
    return pulls_said[at + 1][1]["batch_id"]


STATES: dict[str, When] = {
    "offered": said("w0>w1", "offer"),
    "redirecting": said("w0>w1", "hand_over"),
    "cooperating": said("w1>w0", "pull", "batch_id", "first_layer"),
    "loaded": said("w0>w1", "taken"),
    "dissolved": said("w1>w0", "dissolve"),
}
"""Of a pair: what is said as it gets there, or is there."""

LONG = Case(num_prompts=4, num_late=1, max_tokens=(9, 14))
"""Requests last longer than what happens to them."""
SHORT = Case(num_prompts=4, num_late=1)
FEW = replace(SHORT, seeds=(1, 2))

CASES: dict[str, Case] = {
    "zigzag": Case(),
    "best_effort": Case(policy="best_effort"),
    "overlap": Case(policy="overlap"),
    "stop_the_world": Case(policy="stop_the_world"),
    "hand_over_refused": Case(target_blocks=10),
    "pulled_before_the_first_layer": replace(SHORT, layer_s=(0.1, 0.2)),
    "kv_apart": Case(piece_layers=1),
    "kv_direct": Case(role="prefill"),
    "gates": Case(gates=(0, 1, 2, NUM_LAYERS), planned=1.0),
    "gates_lapse": Case(gates=(0, 1, 2, NUM_LAYERS), planned=0.3),
    "declined": replace(FEW, layer_s=(0.0001, 0.0002)),
    "target_too_small": replace(FEW, num_prompts=5, layer_s=(0.1, 0.3), target_blocks=5),
    "source_full": replace(FEW, max_tokens=(9, 14), source_blocks=16),
    "long_prompts": replace(FEW, prompt_tokens=(30, 70)),
    "long_prompt_cancelled": replace(FEW, prompt_tokens=(50, 70), when=said("w1>w0", "hand_over"), act=cancel_handed),
    "decoder_lost": replace(FEW, role="prefill", when=said("w1>w0", "pull", "kv_direct"), act=kill(DECODER)),
    "answers_lost": replace(SHORT, layer_s=(0.2, 0.8), silence_s=5.0, lost_answers=0.15),
    "tensors_lost": Case(lost_tensors=0.4),
    "target_engine_fails": replace(SHORT, when=STATES["cooperating"], act=fail(TARGET)),
    "target_engine_fails_dissolved": Case(layer_s=(0.004, 0.01), when=STATES["dissolved"], act=fail(TARGET)),
    "source_engine_fails": replace(SHORT, when=STATES["cooperating"], act=fail(SOURCE)),
    "source_drains_split": Case(
        num_late=0, layer_s=(0.15, 0.25), gates=(2, 3), when=said("planner>w1", "gates"), act=drain
    ),
    "source_drains": Case(num_late=0, when=STATES["cooperating"], act=drain),
    "cancelled_inside_a_step": replace(LONG, num_prompts=8, when=STATES["redirecting"], act=cancel_last),
    "cancelled_waiting": replace(LONG, num_prompts=5, when=STATES["offered"], act=cancel_last),
    "cancelled_handed_over": replace(LONG, when=said("w1>w0", "hand_over"), act=cancel_handed),
    "cancelled_pulled": replace(LONG, when=STATES["cooperating"], act=cancel),
    "cancelled_settled": replace(LONG, when=said("w0>w1", "settle", "claim_ids"), act=cancel),
    "cancelled_taken": replace(
        LONG, num_prompts=8, layer_s=(0.004, 0.01), when=said("w1>w0", "taken", "batch_ids"), act=cancel
    ),
    **{f"target_lost_{state}": replace(SHORT, when=when, act=kill(TARGET)) for state, when in STATES.items()},
    **{f"source_lost_{state}": replace(SHORT, when=when, act=kill(SOURCE)) for state, when in STATES.items()},
    "target_leaves": replace(SHORT, when=STATES["cooperating"], act=leave(TARGET)),
    "target_leaves_loaded": replace(SHORT, when=STATES["loaded"], act=leave(TARGET)),
    "source_leaves": replace(SHORT, when=said("w0>w1", "settle", "claim_ids"), act=leave(SOURCE)),
    "source_leaves_loaded": replace(SHORT, when=STATES["loaded"], act=leave(SOURCE)),
}


# --- one run -----------------------------------------------------------------------------------


class Run:
    """A case with a seed."""

    def __init__(self, case: Case, seed: int, late: LateOrder | None = None) -> None:
        self.case = case
        self.twins = Twins(
            seed,
            role=case.role,
            source_blocks=case.source_blocks,
            target_blocks=case.target_blocks,
            chunk_tokens=CHUNK_TOKENS,
            silence_s=case.silence_s,
            lost_answers=case.lost_answers,
            lost_tensors=case.lost_tensors,
            late=late,
        )
        self._drawn = random.Random(seed)
        self._acts_after_s = self._drawn.uniform(0.0, ACT_S)
        self._waits_for = case.when
        self._may_miss = late is not None
        if case.when is not None:
            self.twins.wire.watchers.append(self._look)

    def _look(self, line: Line) -> None:
        if self._waits_for is not None and self._waits_for(line):
            self._waits_for = None
            asyncio.get_running_loop().call_later(self._acts_after_s, self.case.act, self.twins, line)

    async def whole(self) -> dict[str, object]:
        """As it is written down."""
        twins = self.twins
        try:
            await twins.start()
            await self._go()
            await twins.check()
        finally:
            await twins.close()
        assert self._waits_for is None or self._may_miss, "it never came to that"
        return {"report": outcome_of(twins.report), "requests": twins.said_by(), "said": twins.wire.in_order}

    async def _go(self) -> None:
        case, twins, drawn = self.case, self.twins, self._drawn
        pauses_s = [drawn.uniform(*case.layer_s) for _ in range(NUM_LAYERS + 1)]
        prompts = [
            (drawn.randint(*case.prompt_tokens), drawn.randint(*case.max_tokens)) for _ in range(case.num_prompts)
        ]
        late = [(drawn.uniform(0.01, 0.05), drawn.randint(*case.prompt_tokens)) for _ in range(case.num_late)]
        await twins.gateway.bus.respond(subjects.planner("split"), PlanSplit, self._on_split)
        # The first one is not of the pair: the source learns from it how long a prompt takes.
        await twins.submit(_name(0), prompt_tokens=PROMPT_TOKENS[1], max_tokens=1)
        await twins.gateway.end_of(_name(0))
        for number, (prompt_tokens, max_tokens) in enumerate(prompts, start=1):
            twins.begin(twins.submit(_name(number), prompt_tokens=prompt_tokens, max_tokens=max_tokens))
        twins.begin(twins.target.load(pauses_s))
        await asyncio.sleep(drawn.uniform(0.002, 0.01))
        planned_s = [case.planned * s for s in accumulate(pauses_s)]
        await twins.pair(policy=case.policy, valid_s=10.0, layers_ready_s=tuple(planned_s[:-1]), loaded_s=planned_s[-1])
        for number, (pause_s, prompt_tokens) in enumerate(late, start=case.num_prompts + 1):
            await asyncio.sleep(pause_s)
            await twins.submit(_name(number), prompt_tokens=prompt_tokens, max_tokens=case.max_tokens[0])

    async def _on_split(self, message: PlanSplit) -> Ack:
        """The planner's."""
        if self.case.gates:
            gates = tuple(
                Gate(batch_id=batch.batch_id, num_layers=self._drawn.choice(self.case.gates))
                for batch in message.batches
            )
            self.twins.begin(self._set(gates))
        return Ack()

    async def _set(self, gates: tuple[Gate, ...]) -> None:
        await asyncio.sleep(SPLIT_S)
        self.twins.wire.say("planner>w1", "gates", [gate.num_layers for gate in gates])
        revised = self.twins.assignment(policy=self.case.policy, valid_s=10.0, revision=1, gates=gates)
        await self.twins.target.roles.on_assignment(revised, time.monotonic())


def _name(number: int) -> str:
    """Of a request."""
    return chr(ord("a") + number)


def trace(case: Case, seed: int, late: LateOrder | None = None) -> dict[str, object]:
    """One run, on a clock of its own. With ``late`` engines it may not come to what ``case`` waits for."""
    random.seed(seed)

    async def run() -> dict[str, object]:
        return await Run(case, seed, late).whole()

    with pytest.MonkeyPatch.context() as patch:
        if case.piece_layers:
            patch.setattr(kv_fetch, "PIECE_BYTES", case.piece_layers * KV_LAYER_BYTES)
            patch.setattr(staging, "WINDOW_BYTES", 2 * case.piece_layers * KV_LAYER_BYTES)
        with moved_time(), asyncio.Runner(loop_factory=TurnLoop) as runner:
            return runner.run(run())


# --- as files ----------------------------------------------------------------------------------


def written(traces: dict[int, dict[str, object]]) -> str:
    """Those of a case by seed, as JSON with one line for each thing that is said."""
    by_seed = [
        f'"{seed}": {_lines({name: _lines(part) for name, part in one.items()})}' for seed, one in traces.items()
    ]
    return "{\n" + ",\n".join(by_seed) + "\n}\n"


def _lines(part: object) -> str:
    dump = json.dumps
    match part:
        case {"outcome": _} | None:
            return dump(part)
        case {"said": _}:
            return "{\n" + ",\n".join(f"{dump(name)}: {text}" for name, text in part.items()) + "\n}"
        case dict():
            return "{\n" + ",\n".join(f" {dump(name)}: {dump(value)}" for name, value in part.items()) + "\n}"
        case _:
            return "[\n" + ",\n".join(f" {dump(item)}" for item in part) + "\n]"


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        (FOLDER / f"{name}.json").write_text(written({seed: trace(case, seed) for seed in case.seeds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
