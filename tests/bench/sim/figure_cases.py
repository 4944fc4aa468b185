"""Small runs whose figures are kept: what is written anew has to come to the same.

``python -m tests.bench.sim.figure_cases > tests/bench/sim/golden/figures.json`` keeps them. Lengths, arrivals and
deaths are whole numbers and times that are written out: nothing goes through functions that machines compute otherwise.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

import msgspec
import pytest

from bench.replay.plan import PlannedRequest, Shape, plan_requests
from bench.sim.cluster import Cluster, known_cluster
from bench.sim.faults import Fault
from bench.sim.gateway import SimGateway
from bench.sim.models import known_model
from bench.sim.pairs import SOLVER_NODES
from bench.sim.planner import SimPlanner
from bench.sim.run import simulate
from bench.sim.setup import Frame, Setup, WorkerSettings
from bench.sim.streams import Key
from bench.sim.watch import Watch
from bench.systems import SYSTEMS, System
from bench.traces.request import Trace, TraceRequest
from services.planner.core.live.split import assign
from services.worker.core.scheduling.schedule import SchedulerConfig
from shared.messages.common import LivePolicy, Role
from shared.messages.live import Gate, LiveReport
from shared.subjects import Process
from tests.bench.sim.figures import Kept, of_instances, of_run
from tests.bench.sim.instances import Asked, World
from tests.bench.sim.test_migration import ALL, FEW, drain, order, submit, world
from tests.bench.sim.test_pair import CONFIG, Case, Rig

POLICIES: tuple[LivePolicy, ...] = get_args(LivePolicy)
BLITZ, COLOCATED = SYSTEMS["blitz"], SYSTEMS["blitz-colocated"]
SETUP = Setup(cluster=known_cluster("b"), model=known_model("llama3-8b", "a100"), give_back_s=2.0)
HIDDEN_BYTES = 4096
LOADED_AT_S = [1.0, 10.0, 20.0, 40.0]
PROMPTS = [2000, 2500, 2100, 1800, 2900]
DEATHS_S = (2.5, 6.0, 14.0, 42.0)

# --- whole runs --------------------------------------------------------------------------------


def planned(*requests: TraceRequest) -> tuple[PlannedRequest, ...]:
    return plan_requests(Trace("written out", requests), Shape(context_tokens=8192))


def bursts(number: int = 1, *, count: int = 60, every_s: float = 6.0, seed: int = 0) -> tuple[PlannedRequest, ...]:
    """Of prompts of all lengths, fifty in a second."""
    numbers = random.Random(seed)
    at_s = [every_s * burst + 0.02 * place for burst in range(number) for place in range(count)]
    return planned(*[TraceRequest(time_s, numbers.randint(500, 4000), numbers.randint(2, 100)) for time_s in at_s])


def prompts_then_answers() -> tuple[PlannedRequest, ...]:
    """First there is much to read, and then much to write."""
    numbers = random.Random(1)
    read = [TraceRequest(0.02 * i, numbers.randint(2000, 6000), numbers.randint(2, 20)) for i in range(80)]
    write = [TraceRequest(4 + 0.05 * i, numbers.randint(100, 500), numbers.randint(100, 400)) for i in range(120)]
    return planned(*read, *write)


def even_answers() -> tuple[PlannedRequest, ...]:
    """For six seconds: enough instances come for some to go while they decode."""
    numbers = random.Random(2)
    return planned(*[TraceRequest(0.05 * i, numbers.randint(500, 3000), numbers.randint(50, 500)) for i in range(120)])


def slow_network() -> Cluster:
    """Of hosts with one GPU each: what goes to another one goes through its NIC."""
    return msgspec.structs.replace(
        known_cluster("b"), hosts=6, gpus_per_host=1, gpus_per_domain=1, nics_per_host=1, ssds_per_host=1,
        hosts_per_leaf=3, scale_up_gbps=None, nic_gbps=25.0,
    )  # fmt: skip


def few_gpus() -> Cluster:
    """Four of them."""
    return msgspec.structs.replace(
        known_cluster("b"), hosts=2, gpus_per_host=2, gpus_per_domain=2, nics_per_host=1, ssds_per_host=1,
        hosts_per_leaf=2,
    )  # fmt: skip


def with_kv(num_blocks: int, setup: Setup = SETUP) -> Setup:
    """So much room for KV at each instance."""
    return replace(setup, worker=WorkerSettings(kv_bytes=16 * num_blocks * setup.model.kv_bytes_per_token))


def run(setup: Setup, system: System, requests: tuple[PlannedRequest, ...], *faults: Fault) -> Kept:
    """How much the simulator did for it (``num_events``) does not count."""
    reports: list[LiveReport] = []
    handed_on: list[tuple[str, str]] = []
    on_report, on_taken_over = SimPlanner.on_live_report, SimGateway.on_taken_over

    def reported(planner: SimPlanner, report: LiveReport) -> None:
        reports.append(report)
        on_report(planner, report)

    def taken_over(gateway: SimGateway, key: Key, *, worker: Process, instance_id: str) -> None:
        handed_on.append((key[0], instance_id))
        on_taken_over(gateway, key, worker=worker, instance_id=instance_id)

    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimPlanner, "on_live_report", reported)
        patch.setattr(SimGateway, "on_taken_over", taken_over)
        result = simulate(setup, system, requests, frame=Frame(faults=faults), watch=watch)
    others = {
        "duration_s": result.duration_s,
        "cluster": result.cluster,
        "num_died": result.num_died,
        "steps": watch.steps,
        "weights_bytes": {str(kind): num_bytes for kind, num_bytes in watch.weights_bytes.items()},
    }
    return of_run(watch.served, watch.records, reports, handed_on, others)


def runs() -> dict[str, Callable[[], Kept]]:
    found: dict[str, Callable[[], Kept]] = {}
    far = replace(SETUP, cluster=slow_network())
    for name, blitz in (("disaggregated", BLITZ), ("colocated", COLOCATED)):
        for policy in POLICIES:
            about, system = f"run, {name}, {policy}", replace(blitz, live_policy=policy)
            found[about] = partial(run, SETUP, system, bursts())
            found[f"{about}, little KV"] = partial(run, with_kv(1000), system, bursts(count=30))
            for fault in (Fault(0.25, 1, 2.0), Fault(0.5, 0, 2.0)):
                said = f"{about}, worker {fault.worker} dies at {fault.at_s:g} s"
                found[said] = partial(run, SETUP, system, bursts(count=40), fault)
        deaths = tuple([Fault(0.4 + 1.1 * number, None, 3.0) for number in range(8)])
        found[f"run, {name}, many die"] = partial(run, SETUP, blitz, bursts(2, count=40), *deaths)
        found[f"run, {name}, two bursts, slow network"] = partial(run, far, blitz, bursts(2, count=40))
        found[f"run, {name}, instances go"] = partial(run, replace(SETUP, give_back_s=1.0), blitz, even_answers())
        for model, cluster, degree in (("mistral-24b", "b", 2), ("qwen2.5-72b", "a", 4)):
            large = Setup(cluster=known_cluster(cluster), model=known_model(model, "a100", degree=degree))
            found[f"run, {name}, {model}"] = partial(run, large, blitz, bursts(count=40))
    shifts = with_kv(2500, replace(SETUP, cluster=few_gpus()))
    found["run, roles change"] = partial(run, shifts, BLITZ, prompts_then_answers())
    return found


# --- pairs by themselves -----------------------------------------------------------------------


def rig(policy: LivePolicy, role: Role = "colocated", num_layers: int = 4, decoder: SchedulerConfig = CONFIG) -> Rig:
    return Rig(num_layers, policy, role=role, decoder=decoder, message_s=0.001, hidden_bytes_per_token=HIDDEN_BYTES)


def ended(rigs: list[Rig], lost: list[str]) -> Kept:
    reports = [pair.report for rig in rigs for pair in rig.ended if pair.report is not None]
    return of_instances([rig.heard for rig in rigs], reports, lost, [rig.carried() for rig in rigs])


def drawn_pairs(policy: LivePolicy, role: Role, *, gates: bool = False) -> Kept:
    """Prompts that wait, and one more with each layer. ``gates``: of the planner's own search."""
    rigs = []
    for seed in range(6):
        case = Case(seed)
        made = rig(policy, role, len(case.loaded_at))
        made.submit(case.tokens, output_tokens=20)
        made.load(case.loaded_at)
        for number, at_s in enumerate(case.loaded_at, start=len(case.tokens)):
            asked = Asked(f"r{number}", 300 * number, 5)
            made.clock.at(at_s - 0.05, partial(made.source.submit, asked, decode_at=made.decode_at))
        if gates:
            found = assign(case.jobs, case.loaded_at, max_nodes=SOLVER_NODES).gates
            made.pair.set_gates(tuple([Gate(batch_id=name, num_layers=count) for name, count in found.items()]))
        made.pair.begin()
        made.clock.run()
        made.clean()
        rigs.append(made)
    return ended(rigs, [])


def begun(policy: LivePolicy, role: Role, until_s: float, decoder: SchedulerConfig = CONFIG) -> Rig:
    made = rig(policy, role, decoder=decoder)
    made.submit(PROMPTS, output_tokens=100)
    made.load(LOADED_AT_S)
    made.pair.begin()
    made.clock.run(until_s)
    return made


def one_dies(policy: LivePolicy, role: Role, who: str) -> Kept:
    """At any time of a pair."""
    rigs, lost = [], []
    for at_s in DEATHS_S:
        made = begun(policy, role, at_s)
        lost += made.world.instances[who].kill()
        if who == "target":
            made.pair.target_gone("it died", 0.2)
        elif who == "source":
            made.pair.source_gone("it died", 0.2)
        made.clock.run()
        rigs.append(made)
    return ended(rigs, lost)


def some_are_cancelled(policy: LivePolicy, role: Role) -> Kept:
    rigs = []
    for at_s in DEATHS_S:
        made = begun(policy, role, at_s)
        for name in ("r1", "r3", "r4"):
            for member in (made.source, made.target):
                member.cancel((name, 0))
        made.clock.run()
        rigs.append(made)
    return ended(rigs, [])


def source_drains(policy: LivePolicy, role: Role) -> Kept:
    rigs = []
    for at_s in DEATHS_S:
        made = begun(policy, role, at_s)
        made.source.drain()
        made.clock.run()
        rigs.append(made)
    return ended(rigs, [])


def no_room_to_decode(policy: LivePolicy) -> Kept:
    """KV of what the decode instance does not take goes through the source."""
    made = begun(policy, "prefill", 0.0, replace(CONFIG, num_blocks=320))
    made.clock.run()
    made.clean()
    return ended([made], [])


def pairs() -> dict[str, Callable[[], Kept]]:
    found: dict[str, Callable[[], Kept]] = {}
    roles: tuple[Role, ...] = ("colocated", "prefill")
    for policy in POLICIES:
        for role in roles:
            about = f"{role}, {policy}"
            found[f"pair, {about}"] = partial(drawn_pairs, policy, role)
            for who in ("source", "target") if role == "colocated" else ("source", "target", "decoder"):
                found[f"pair, {about}, {who} dies"] = partial(one_dies, policy, role, who)
            found[f"pair, {about}, some are cancelled"] = partial(some_are_cancelled, policy, role)
            found[f"pair, {about}, source drains"] = partial(source_drains, policy, role)
        found[f"pair, {policy}, no room to decode"] = partial(no_room_to_decode, policy)
    found["pair, zigzag, split by the planner"] = partial(drawn_pairs, "zigzag", "colocated", gates=True)
    return found


# --- moves by themselves -----------------------------------------------------------------------


def moved(made: World, lost: list[str]) -> Kept:
    made.clock.run()
    carried = {f"{purpose} {first.name}": num for (purpose, first), num in made.network.carried.items()}
    return of_instances([made.heard], [], lost, [carried])


def move(gbps: float, dies: str = "") -> Kept:
    """An instance gives some away, and goes a while later; some do not find room at once."""
    little = SchedulerConfig(num_blocks=600, block_size=16, max_num_sequences=6, max_batch_tokens=2048)
    made = world(gbps, b=FEW, c=little, d=CONFIG)
    for number in range(16):
        made.clock.at(0.1 * number, partial(submit, made, f"r{number}", 200 + 170 * number, 100 + 70 * number))
    order(made, 6000)
    order(made, ALL, at_s=1.4, for_head=True)
    drain(made, at_s=2.0)
    made.clock.run(2.02)
    lost = made.instances[dies].kill() if dies else []
    return moved(made, lost)


def little_kv() -> Kept:
    """Instances that hardly have room: requests are preempted while others leave."""
    little = SchedulerConfig(num_blocks=300, block_size=16, max_num_sequences=6, max_batch_tokens=2048)
    made = World(2.0, 0.001, 0.2)
    for name in "abc":
        made.instance(name, config=little)
    for number in range(24):
        submit(made, f"r{number}", 100 + 83 * (number % 11), 50 + 97 * (number % 7), at="aab"[number % 3])
    order(made, 1000, at_s=0.5)
    drain(made, at_s=3.0, send_back="none")
    return moved(made, [])


def moves() -> dict[str, Callable[[], Kept]]:
    found: dict[str, Callable[[], Kept]] = {"move, little KV": little_kv}
    for gbps in (5.0, 20.0, 100.0):
        found[f"move, {gbps:g} Gbit/s"] = partial(move, gbps)
        for dies in ("a", "d"):
            found[f"move, {gbps:g} Gbit/s, {dies} dies"] = partial(move, gbps, dies)
    return found


CASES = {**runs(), **pairs(), **moves()}
"""By name; each gives its figures."""


def main() -> int:
    kept = {name: case() for name, case in CASES.items()}
    sys.stdout.write(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
