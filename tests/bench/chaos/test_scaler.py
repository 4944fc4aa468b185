from __future__ import annotations

from bench.chaos.injected_fault import now_s
from bench.chaos.plan import ScaleWish, Wish
from bench.chaos.scaler import Scaler
from shared.errors import NoResponder

WISH = ScaleWish(0.0, "demo", "prefill", 2, "auto")


async def test_an_operation_is_asked_for_again_while_somebody_is_away() -> None:
    asked = 0

    async def ask(wish: Wish) -> str:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise NoResponder("the planner is away")
        return "out done"

    scaler = Scaler(ask, patience_s=600.0)
    await scaler.run([WISH], start_s=now_s())
    assert scaler.outcomes == {"prefill out done": 1}


async def test_one_that_is_refused_for_long_is_counted_by_its_error() -> None:
    async def ask(wish: Wish) -> str:
        raise NoResponder("the planner is away")

    scaler = Scaler(ask, patience_s=0.0)
    await scaler.run([WISH, WISH], start_s=now_s())
    assert scaler.outcomes == {"prefill no_responder": 2}
