"""Whatever a client sends to whatever route: a typed answer, soon, and the gateway goes on as it was.

A few cases per route by default; ``BLITZ_TEST_HOSTILE_CASES=10000`` makes that many in all, at least 200 per route.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shared import subjects
from shared.errors import ModelNotFound, PlanNotFound
from shared.messages.operations import GetScaleRecord, ListScaleRecords, ScaleRecord, ScaleRecords, StartScale
from shared.messages.registry import GetGpuTime, GpuTimeReport
from tests.services.gateway.checkpoint import CHAT_TEMPLATE, model_record, write_checkpoint
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http import bodies
from tests.services.gateway.http.test_field_types import fault
from tests.services.gateway.http.test_refusals import CHAT, TEXT
from tests.wait_until import WAIT_S

CASES = int(os.environ.get("BLITZ_TEST_HOSTILE_CASES", "0"))
MIN_CASES_PER_ROUTE = 200
SHORT_CASES_PER_ROUTE = 15
MAX_ANSWER_S = 1.0
"""Of this process's CPU time, whoever else takes the machine's. And two more per MiB of the body: so long may a text of
a megabyte take to become tokens, in its thread, and strings where somebody asks for them."""
MAX_GROWTH_BYTES = 64 * 1024 * 1024
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Case:
    """One request."""

    method: str
    path: str
    body: bytes = b""


def posts(path: str, drawn: st.SearchStrategy[bytes]) -> st.SearchStrategy[Case]:
    return bodies.hostile(drawn).map(lambda body: Case("POST", path, body))


def gets(path: str, method: str = "GET") -> st.SearchStrategy[Case]:
    """With a query, and a body that nobody asked for."""
    return st.builds(lambda query, body: Case(method, f"{path}?{query}", body), bodies.queries, st.binary(max_size=50))


def below(path: str, method: str = "GET", behind: str = "") -> st.SearchStrategy[Case]:
    return bodies.paths.map(lambda rest: Case(method, f"{path}{rest}{behind}"))


ROUTES: dict[str, st.SearchStrategy[Case]] = {
    "chat": posts(CHAT, bodies.chat),
    "tools": posts(CHAT, bodies.tools),
    "guided": posts(CHAT, bodies.guided),
    "completions": posts(TEXT, bodies.text),
    "responses": posts("/v1/responses", bodies.responses),
    "messages": posts("/v1/messages", bodies.turns),
    "count_tokens": posts("/v1/messages/count_tokens", bodies.turns),
    "tokenize": posts("/tokenize", bodies.tokenize),
    "detokenize": posts("/detokenize", bodies.detokenize),
    "models": gets("/v1/models"),
    "model": below("/v1/models"),
    "add_model": posts("/admin/models", bodies.add_model),
    "set_model": bodies.hostile(bodies.set_model).map(lambda body: Case("PATCH", "/admin/models/tiny", body)),
    "set_other": below("/admin/models", "PATCH"),
    "remove_model": below("/admin/models", "DELETE"),
    "scale": posts("/admin/models/tiny/scale", bodies.scale),
    "scale_other": below("/admin/models", "POST", "/scale"),
    "status": gets("/admin/status"),
    "pool": gets("/admin/pool"),
    "gpu_time": st.builds(lambda model: Case("GET", f"/admin/gpu_time?model={model}"), bodies.queries),
    "admin_models": gets("/admin/models"),
    "records": st.builds(lambda limit: Case("GET", f"/admin/scale?limit={limit}"), bodies.queries),
    "record": st.builds(
        lambda rest, wait: Case("GET", f"/admin/scale{rest}?wait_s={wait}"), bodies.paths, bodies.queries
    ),
    "health": gets("/health"),
    "ready": gets("/ready"),
    "live": gets("/live"),
    "metrics": gets("/metrics"),
    "unknown": st.builds(
        Case,
        st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]),
        bodies.paths,
        st.binary(max_size=99),
    ),
}


async def planner(stack: Stack) -> None:
    """One that has done nothing yet, and a pool that has counted nothing."""
    bus = stack.broker.bus("planner")

    async def refuse(request: Any) -> ScaleRecord:
        raise PlanNotFound("no such plan")

    async def none(request: ListScaleRecords) -> ScaleRecords:
        return ScaleRecords(records=())

    async def counted(request: GetGpuTime) -> GpuTimeReport:
        if request.model:
            raise ModelNotFound("no such model")
        return GpuTimeReport(counted_s=0.0, total_s=0.0, hour_cost=0.0, uses=())

    await bus.respond(subjects.pool("gpu_time"), GetGpuTime, counted)
    await bus.respond(subjects.planner("scale"), StartScale, refuse)
    await bus.respond(subjects.planner("record"), GetScaleRecord, refuse)
    await bus.respond(subjects.planner("records"), ListScaleRecords, none)


def cases_of(name: str, count: int) -> list[Case]:
    """Cases of a route, as hypothesis draws them."""
    drawn: list[Case] = []

    @settings(
        max_examples=count, database=None, derandomize=True, phases=[Phase.generate], deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(ROUTES[name])
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    while len(drawn) < count:
        # A route of few inputs has no more different ones.
        drawn += drawn[: count - len(drawn)]
    return drawn


def held_bytes() -> int:
    """What this process holds, without what its allocator keeps of what was given back."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return psutil.Process().memory_info().rss


async def wrong_with(stack: Stack, case: Case) -> str:
    """What is wrong with the answer to a case; empty if nothing is."""
    began_s = time.process_time()
    response = await stack.http.request(case.method, case.path, content=case.body, headers=JSON)
    took_s = time.process_time() - began_s
    if took_s > MAX_ANSWER_S + 2 * len(case.body) / 2**20:
        return f"answered after {took_s:.2f} s of CPU time"
    if case.path.startswith(("/live", "/health", "/ready", "/metrics")) and response.status_code == 200:
        return ""
    # However many slashes there are, and whatever httpx takes for a host.
    if not response.request.url.path.strip("/") and response.headers.get("location") == "/ui":
        return ""
    return fault(response)


@pytest.fixture
async def stack(make_stack: StackFactory, tmp_path: Path) -> Stack:
    """Its model's template takes functions, and what it writes is, where it may be, a call."""
    folder = write_checkpoint(
        tmp_path / "tiny", chat_template=CHAT_TEMPLATE + "{{ tools | tojson if tools }}<tool_call>"
    )
    return await make_stack(record=model_record(folder))


@pytest.mark.timeout(3600 if CASES else 600)
async def test_no_request_is_a_fault_takes_long_or_leaves_anything_behind(stack: Stack) -> None:
    await planner(stack)
    count = max(MIN_CASES_PER_ROUTE, CASES // len(ROUTES) + 1) if CASES else SHORT_CASES_PER_ROUTE
    cases = [case for name in ROUTES for case in cases_of(name, count)]
    random.Random(0).shuffle(cases)
    # Until then what is made once is made, and the allocator has what it keeps.
    warm_up = len(cases) // 2
    found, before_bytes = [], 0
    for number, case in enumerate(cases):
        if number == warm_up:
            stack.forget()
            before_bytes = held_bytes()
        wrong = await wrong_with(stack, case)
        if wrong:
            found.append(f"{case.method} {case.path} {case.body[:200]!r}: {wrong[:300]}")
    stack.forget()
    grown_bytes = held_bytes() - before_bytes
    assert found == []
    assert grown_bytes < MAX_GROWTH_BYTES
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 0)
    assert stack.gateway.request_memory.used_bytes == stack.gateway.response_memory.used_bytes == 0
    async with asyncio.timeout(WAIT_S):
        answer = await stack.http.post(TEXT, json={"model": "tiny", "prompt": "a"})
    assert answer.json()["choices"][0]["text"] == "hello"
