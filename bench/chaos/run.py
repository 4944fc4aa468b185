"""One run: a stack, what it answers idle, the chaos, and what is left when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.chaos.answer import Expectation
from bench.chaos.clocks import clock_file, set_clock, step_clocks
from bench.chaos.expect import ChaosFailed, Expected, expect
from bench.chaos.gateways import Gateways
from bench.chaos.injected_fault import InjectedFault, now_s
from bench.chaos.killer import Killer
from bench.chaos.load import Load, Record
from bench.chaos.observer import Observer
from bench.chaos.pauses import Prefill, pauses
from bench.chaos.plan import DrainWish, Plan, ScaleWish, ServingWish, Wish, kind_of, make_plan, worker_of
from bench.chaos.processes import StackProcesses
from bench.chaos.question import Question, make_questions
from bench.chaos.recovery import check_recovery, is_whole
from bench.chaos.result import Result
from bench.chaos.scaler import Scaler
from bench.chaos.setting import ENGINE_ARGS, MAX_RUNNING, SLEEPY, SLEEPY_KEEP_ALIVE_S, SPLIT, SWITCHED, Setting
from bench.chaos.tuned import make_tuned
from compose.stack import Stack
from shared.bus.nats import NatsBus
from shared.errors import BlitzError
from shared.messages.admin import SetModelBody
from shared.messages.operations import ScaleRecord

Say = Callable[[str], None]
LATE_FAULT = "late engine: its caller's fault"
"""What a worker's log says of one (``services.worker.engine.late``)."""
_HOLD_S = 20.0
"""Of a scale operation's floor: the monitor has its way again after that."""
_FIRST_INSTANCES = 2
_SCALE_S = 25.0
_SCALE_POLL_S = 5.0
_REVIVAL_S = 90.0
"""Within which whatever was struck last runs again. A gateway that drains alone takes 20 s."""
_START_S = 60.0
"""A further instance of vLLM may take so long."""
_RECENT_S = 1.0
"""What a worker said of its instance so lately, is so."""


async def run(setting: Setting, model: Path, state_dir: Path, *, say: Say = lambda _: None) -> Result:
    """Take a stack up, disturb it, take it down. Raises ``StackError`` and ``BlitzError``; nothing is left behind."""
    for name in setting.skewed:
        set_clock(clock_file(state_dir, name), 0.0)
    stack = Stack(setting.config(model, state_dir), say=say)
    async with stack:
        await stack.wait_ready(setting.ready_s)
        return await stack.unless_given_up(_Chaos(setting, stack, model, say).measure())


def _late_faults(state_dir: Path) -> int:
    """What workers say in their logs of calls that did not wait for a late engine."""
    logs = (state_dir / "logs").glob("worker-*.log")
    return sum(log.read_text(errors="replace").count(LATE_FAULT) for log in logs)


class _Chaos:
    def __init__(self, setting: Setting, stack: Stack, model: Path, say: Say) -> None:
        self._setting = setting
        self._stack = stack
        self._model = model
        self._say = say
        self._gateways = Gateways({"gateway": stack.url})
        self._observer = Observer(MAX_RUNNING)
        self._processes = StackProcesses(stack, self._observer.at_a_gate, with_vllm=setting.with_vllm)
        self._killer = Killer(self._processes, before=self._before, after=self._after)

    async def measure(self) -> Result:
        setting, name = self._setting, self._model.name
        plan = make_plan(
            setting.seed,
            seconds=setting.seconds,
            every_s=setting.every_s,
            kinds=setting.kinds,
            members=self._processes.names(),
            how=setting.how,
            scalables=setting.scalables(name),
            switched=tuple(model for model in setting.models(name) if model.endswith(SWITCHED)),
            drained=self._workers() if setting.fleet else (),
            skewed=setting.skewed,
            skew_s=setting.skew_s,
        )
        # As a gateway, who hears tokens and load.
        access = self._stack.nats_access("gateway")
        bus = await NatsBus.connect(self._stack.addresses.nats_url, name="gateway", id="bench-chaos", access=access)
        try:
            await self._observer.listen(bus)
            if setting.with_vllm:
                await self._add(self._model, name)
                if not await self._serving(1, setting.ready_s):
                    raise ChaosFailed(f"{name} is not served; see {self._stack.state_dir.logs}")
            if setting.roles:
                await self._split()
            if setting.fleet:
                await self._add_models()
            questions = make_questions(
                setting.seed, setting.questions, schemas=setting.engine != "mock", redraws=setting.with_vllm
            )
            self._say(f"asking {len(questions)} questions of the idle stack, streamed and whole")
            expected = await self._expect(name, questions)
            answers = await self._expectations(name, questions, expected)
            if not setting.roles and not setting.fleet:
                # So that there is somewhere to go from the first kill on.
                await self._scale(ScaleWish(0.0, name, "colocated", _FIRST_INSTANCES, "never"), _HOLD_S)
                if setting.with_vllm:
                    await self._serving(_FIRST_INSTANCES, _START_S)
            self._say(f"{len(plan.kills)} kills in {setting.seconds:g} s")
            load = Load(
                self._gateways,
                setting.asked(name),
                questions,
                answers,
                seed=setting.seed,
                on_record=self._tell,
                silence_s=setting.silence_s,
            )
            scaler = Scaler(self._execute)
            start_s = now_s()
            await self._disturb(plan, load, scaler, start_s)
            end_s = now_s()
            if setting.fleet:
                await self._use_all_workers()
            faults = self._killer.faults
            return Result(
                records=load.records,
                unsent=load.unsent,
                faults=faults,
                skipped=self._killer.skipped,
                scales=scaler.outcomes,
                pauses=pauses(load.records, faults, self._observer, Prefill.of(expected.first_tokens)),
                recovery=await check_recovery(
                    self._stack,
                    self._gateways["gateway"],
                    setting.models(name),
                    questions,
                    answers,
                    faults,
                    self._observer,
                    silence_s=setting.silence_s,
                ),
                start_s=start_s,
                end_s=end_s,
                late_faults=_late_faults(self._stack.state_dir.path),
                schema_answers=expected.schema_answers,
                schema_cuts=expected.schema_cuts,
            )
        finally:
            self._gateways.close()
            await bus.close()

    async def _expect(self, model: str, questions: Sequence[Question]) -> Expected:
        return await expect(self._gateways["gateway"], model, questions, silence_s=self._setting.silence_s)

    async def _expectations(
        self, name: str, questions: Sequence[Question], expected: Expected
    ) -> Mapping[str, Mapping[int, Expectation]]:
        """Of each model, by question. ``expected``: of the first one, with whose weights others are served, too."""
        of = dict.fromkeys(self._setting.models(name), expected.answers)
        for tuned in self._setting.tuned(name):
            of[tuned] = (await self._expect(tuned, questions)).answers
        return of

    async def _add(self, path: Path, name: str, *, keep_alive_s: float | None = None) -> None:
        """A model, served by the engine that is chosen."""
        engine, args = ("vllm", dict(ENGINE_ARGS)) if self._setting.with_vllm else (None, None)
        await self._stack.admin.add_model(
            str(path), name=name, engine=engine, engine_args=args, keep_alive_s=keep_alive_s
        )

    async def _serving(self, instances: int, limit_s: float) -> bool:
        """Wait until so many of the first model's serve; False: not in time."""
        deadline_s, model = now_s() + limit_s, self._model.name
        while now_s() < deadline_s:
            status = await self._stack.admin.status()
            if sum(i.model == model and i.state == "serving" for i in status.instances) >= instances:
                return True
            await asyncio.sleep(0.2)
        return False

    async def _split(self) -> None:
        """The same checkpoint once more, under another name, with one prefill and one decode instance."""
        split = self._model.name + SPLIT
        await self._stack.admin.add_model(str(self._model), name=split, min_instances=0)
        # Floors that outlast everything: what dies is replaced without anybody asking.
        hold_s = 2 * self._setting.seconds + self._setting.ready_s + self._setting.answers_s
        for role in ("prefill", "decode"):
            wish = ScaleWish(0.0, split, "prefill" if role == "prefill" else "decode", 1, "never")
            record = await self._scale(wish, hold_s)
            if record.status != "done":
                raise ChaosFailed(f"no {role} instance of {split}: {record.reason or record.status}")

    async def _disturb(self, plan: Plan, load: Load, scaler: Scaler, start_s: float) -> None:
        quiet, setting = asyncio.Event(), self._setting
        try:
            async with asyncio.timeout(setting.seconds + _REVIVAL_S + setting.answers_s), asyncio.TaskGroup() as tasks:
                asking = tasks.create_task(load.run(setting.clients, quiet))
                scaling = tasks.create_task(scaler.run(plan.wishes, start_s=start_s))
                stepping = step_clocks(plan.steps, self._stack.state_dir.path, start_s=start_s, say=self._say)
                clocks = tasks.create_task(stepping)
                await self._killer.run(plan.kills, start_s=start_s)
                await asyncio.sleep(max(0.0, start_s + setting.seconds - now_s()))
                await scaling
                await clocks
                quiet.set()
                self._say("no more kills: waiting for the last answers")
                await asking
        except TimeoutError as error:
            away = [fault.member for fault in self._killer.faults if fault.over_s is None]
            raise ChaosFailed(f"not over in time; processes that did not come back: {away or 'none'}") from error

    async def _add_models(self) -> None:
        """The same checkpoint twice more: a model whose instances change roles, and one that sleeps whenever it may.
        Of vLLM two of the second kind, with other weights each: instances of all three take turns in a process."""
        admin, name = self._stack.admin, self._model.name
        if self._setting.with_vllm:
            for seed, tuned in enumerate(self._setting.tuned(name)):
                path = await asyncio.to_thread(make_tuned, self._model, self._stack.state_dir.path, seed)
                await self._add(path, tuned, keep_alive_s=SLEEPY_KEEP_ALIVE_S)
            return
        await admin.add_model(str(self._model), name=name + SWITCHED, served_as="disaggregated")
        await admin.add_model(str(self._model), name=name + SLEEPY, keep_alive_s=SLEEPY_KEEP_ALIVE_S)
        deadline_s = now_s() + self._setting.ready_s
        while not is_whole(await admin.status(), self._setting.models(name), self._setting.workers):
            if now_s() > deadline_s:
                raise ChaosFailed(f"{name + SWITCHED} does not serve")
            await asyncio.sleep(0.2)

    async def _execute(self, wish: Wish) -> str:
        """What became of it. Raises ``BlitzError``."""
        match wish:
            case ScaleWish():
                record = await self._scale(wish, _HOLD_S if wish.role == "colocated" else 10 * self._setting.ready_s)
                return f"{record.direction} {record.status}"
            case ServingWish():
                await self._stack.admin.set_model(wish.model, SetModelBody(served_as=wish.serving))
                return "done"
            case DrainWish():
                await self._stack.admin.drain_worker(wish.worker)
                await asyncio.sleep(wish.for_s)
                await self._stack.admin.undrain_worker(wish.worker)
                return "done"

    async def _use_all_workers(self) -> None:
        """What could not be undrained, because the pool was away, is now."""
        for worker in self._workers():
            deadline_s = now_s() + self._setting.ready_s
            while True:
                try:
                    await self._stack.admin.undrain_worker(worker)
                    break
                except BlitzError as error:
                    if now_s() > deadline_s:
                        raise ChaosFailed(f"{worker} cannot be used again: {error}") from error
                    await asyncio.sleep(0.5)

    def _workers(self) -> tuple[str, ...]:
        return tuple(name for name in self._stack.processes if kind_of(name) == "worker")

    async def _scale(self, wish: ScaleWish, hold_s: float) -> ScaleRecord:
        admin, deadline_s = self._stack.admin, now_s() + _SCALE_S
        record = await admin.scale(wish.model, wish.instances, hold_s=hold_s, live=wish.live, role=wish.role)
        while record.status == "running" and (left_s := deadline_s - now_s()) > 0:
            record = await admin.scale_record(record.plan_id, wait_s=min(_SCALE_POLL_S, left_s))
        return record

    def _before(self, fault: InjectedFault) -> None:
        if worker := worker_of(fault.member):
            fault.state = self._observer.state_of(worker, within_s=_RECENT_S) or "none"
        self._observer.fault_injected(fault)
        self._gateways.fault_injected(fault)
        self._say(f"SIG{fault.how} to {fault.member}" + (f", {fault.state}" if fault.state else ""))

    async def _after(self, fault: InjectedFault) -> None:
        if fault.kind == "gateway":
            await self._gateways.revive(fault.member)

    def _tell(self, record: Record) -> None:
        if record.outcome.verdict in ("failed", "different"):
            self._say(f"{record.outcome.verdict}: {record.response_id or record.model}: {record.outcome.why}")
