"""What is left of the stack when nothing is killed any more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from bench.chaos.answer import Expectation, Failure
from bench.chaos.gateways import Gateway
from bench.chaos.injected_fault import InjectedFault, now_s
from bench.chaos.load import ask
from bench.chaos.observer import Observer
from bench.chaos.question import Question
from bench.chaos.result import Recovery
from bench.chaos.setting import SLEEPY, SPLIT
from compose.stack import Stack
from shared.errors import BlitzError
from shared.messages.admin import Status

_WHOLE_S = 120.0
_EMPTY_S = 30.0
"""A worker forgets a dead gateway's requests 5 s after its last heartbeat."""
_POLL_S = 0.2
_RECENT_S = 1.0
_ASKED_AGAIN = 12


async def check_recovery(
    stack: Stack,
    gateway: Gateway,
    models: Sequence[str],
    questions: Sequence[Question],
    expected: Mapping[str, Mapping[int, Expectation]],
    faults: Sequence[InjectedFault],
    observer: Observer,
    *,
    silence_s: float,
) -> Recovery:
    """Wait until the stack is whole and its workers are empty, and ask some questions again."""
    since_s = max((s.over_s or s.at_s for s in faults), default=now_s())
    num_workers = stack.config.workers
    whole_s = await _until_whole(stack, models, num_workers)
    left = await _until_empty(observer)
    wrong = []
    again = [(model, question) for model in models for question in questions[:_ASKED_AGAIN]]
    for model, question in again:
        _, got = await ask(gateway, model, question, stream=False, silence_s=silence_s)
        if isinstance(got, Failure):
            wrong.append(f"{model}, question {question.index}: {got.kind}: {got.detail}")
        elif difference := expected[model][question.index].wrong(got):
            wrong.append(f"{model}, question {question.index}: {difference}")
    # What was struck, and workers whose vLLM was.
    ended = Counter(member for s in faults if s.ends for member in {s.member, s.worker})
    restarts = {name: child.num_restarts - ended[name] for name, child in stack.processes.items()}
    return Recovery(
        whole_again_s=None if whole_s is None else max(0.0, whole_s - since_s),
        asked=len(again),
        wrong=tuple(wrong),
        left_behind=left,
        unasked_restarts={name: count for name, count in restarts.items() if count > 0},
    )


async def _until_whole(stack: Stack, models: Sequence[str], num_workers: int) -> float | None:
    """When all workers were there and every model could be served; None: not in time."""
    deadline_s = now_s() + _WHOLE_S
    while now_s() < deadline_s:
        try:
            if is_whole(await stack.admin.status(), models, num_workers):
                return now_s()
        except BlitzError:
            # The registry or the gateway is on its way back.
            pass
        await asyncio.sleep(_POLL_S)
    return None


def is_whole(status: Status, models: Sequence[str], num_workers: int) -> bool:
    """Whether all workers are there, and each model has an instance of every role that it needs."""

    def serves(model: str, role: str) -> bool:
        return any(i.model == model and i.role == role and i.state == "serving" for i in status.instances)

    served = {model.name: model.served_as for model in status.models}

    def roles(model: str) -> tuple[str, ...]:
        if model.endswith(SLEEPY):
            return ()
        return (
            ("prefill", "decode") if model.endswith(SPLIT) or served.get(model) == "disaggregated" else ("colocated",)
        )

    return len(status.workers) == num_workers and all(serves(model, role) for model in models for role in roles(model))


async def _until_empty(observer: Observer) -> tuple[str, ...]:
    """What workers still hold when no request is open any more."""
    deadline_s = now_s() + _EMPTY_S
    while True:
        held = tuple(
            f"{load.worker_id}: {load.running_requests} running, {load.queued_requests} queued, "
            f"{load.kv_blocks_used} KV blocks"
            for load in observer.loads(within_s=_RECENT_S)
            if load.running_requests or load.queued_requests or load.kv_blocks_used
        )
        if not held or now_s() > deadline_s:
            return held
        await asyncio.sleep(_POLL_S)
