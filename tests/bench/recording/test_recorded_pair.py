"""A pair of real workers, recorded: fresh machines that hear what its members' machines heard want the same done."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType

import pytest
import pytest_asyncio

from bench.recording.child import recorded
from bench.recording.player import Player, play
from bench.recording.records import records
from compose.child import Child, ChildSpec
from compose.children import kind_of
from compose.stack import Stack
from compose.supervisor import Supervisor
from services.worker.core.live import source, target
from shared.messages.operations import ScaleRecord
from tests.stack.client import complete, openai_client
from tests.stack.conftest import MODEL, NO_DEMAND, READY_S, mock_config

pytestmark = [pytest.mark.stack, pytest.mark.ucx]

SLOW = {
    # Weights come from the disk, in about 2.6 s: there is a pair, also on a busy machine.
    "BLITZ_PLANNER_STRATEGY": "disk",
    "BLITZ_WORKER_SSD_GBPS": "0.002",
    "BLITZ_WORKER_LIMIT_READS": "true",
    # All prompts take longer than that, of two instances as well.
    "BLITZ_MOCK_LAYER_PER_TOKEN_US": "200",
    "BLITZ_WORKER_PREFILL_CHUNK": "128",
}
NUM_PROMPTS = 12
"""Of a half of the burst."""


async def _cooperate(stack: Stack) -> ScaleRecord:
    """A burst at one instance while a second one loads: half of it is there before, and the last client of the other
    half leaves. The operation's record, once its pair has ended."""
    async with openai_client(stack) as client:

        def ask(numbers: range) -> list[asyncio.Task[str]]:
            prompts = [[7 + i] * (100 + 16 * i) for i in numbers]
            return [asyncio.create_task(complete(client, MODEL, prompt=p, max_tokens=4)) for p in prompts]

        before = ask(range(NUM_PROMPTS))
        record = await stack.admin.scale(MODEL, 2, hold_s=600.0, live="always")
        behind = ask(range(NUM_PROMPTS, 2 * NUM_PROMPTS))
        await asyncio.wait(behind, return_when=asyncio.FIRST_COMPLETED)
        behind.pop().cancel()
        await asyncio.gather(*before, *behind)
        while record.status == "running" or any(pair.outcome == "running" for pair in record.live):
            record = await stack.admin.scale_record(record.plan_id)
            await asyncio.sleep(0.02)
    return record


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a pair's two workers, by the machine that each made."""
    folder, start = tmp_path_factory.mktemp("recordings"), Supervisor.start

    async def start_recorded(self: Supervisor, spec: ChildSpec) -> Child:
        return await start(self, recorded(spec, folder) if kind_of(spec.name) == "worker" else spec)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Supervisor, "start", start_recorded)
        config = mock_config(tmp_path_factory.mktemp("pair"), workers=2, **NO_DEMAND, **SLOW)
        async with Stack(config) as stack:
            await stack.wait_ready(READY_S)
            record = await _cooperate(stack)
    (pair,) = record.live
    assert pair.outcome == "dissolved", record
    assert any(batch.target_layers and batch.source_layers for batch in pair.batches), record
    files = sorted(folder.iterdir())
    assert len(files) == 2
    return {_name(made.name): file for file in files for made in records(file) if made.kind == "new"}


def _name(written: str) -> str:
    """Of a class, without its module."""
    return written.rpartition(":")[2]


def _handled(file: Path) -> tuple[set[str], set[str]]:
    """The kinds of events that a machine was told, and of what it wanted done."""
    calls = [record for record in records(file) if record.name == "handle"]
    return {_name(call.args[0][2]) for call in calls}, {_name(new[2]) for call in calls for new in call.result[1]}


@pytest.mark.parametrize(
    ("machine", "events", "actions"),
    [
        (
            "SourceMachine",
            {"Begin", "RequestArrived", "HasLanded", "EngineFree", "PartWanted", "TargetAsks", "Cancelled", "Due"},
            {"AskHandOver", "AskTarget", "BeginBatch", "FetchKv", "Finish", "TellCancelled", "Restore", "Over"},
        ),
        (
            "TargetMachine",
            {"Begin", "HandedOver", "SourceAsks", "LayersReady", "HasLanded", "PartWanted", "Cancelled"},
            {"Reserve", "RunPart", "SendHidden", "SendKv", "Finish", "TellTaken", "EndRequests", "Announce", "Over"},
        ),
    ],
    ids=["source", "target"],
)
def test_a_pair_of_real_workers_is_played_again(
    recordings: dict[str, Path], machine: str, events: set[str], actions: set[str]
) -> None:
    file = recordings[machine]
    played = play(file)
    assert played.difference is None, str(played.difference)[:4000]
    assert played.num_calls[f"{machine}.handle"] > 100
    told, wanted = _handled(file)
    assert (events - told, actions - wanted) == (set(), set())
    # The process had ended by itself, and told how all was then.
    ended = {_name(record.name) for record in records(file) if record.kind == "state"}
    assert ended >= {machine, "PairLife"}
    assert ("Queue" in ended) == (machine == "TargetMachine")


@pytest.mark.parametrize(
    ("machine", "module"), [("SourceMachine", source), ("TargetMachine", target)], ids=["source", "target"]
)
def test_a_machine_that_decides_otherwise_is_found_with_the_event(
    recordings: dict[str, Path], monkeypatch: pytest.MonkeyPatch, machine: str, module: ModuleType
) -> None:
    monkeypatch.setattr(module, "part_from", lambda begin, num_tokens, most_tokens: begin + 1)
    difference = play(recordings[machine]).difference
    assert difference is not None
    assert "handle(PartWanted()" in difference.call
    assert [_name(difference.played[1][0][2]), difference.played[1][0][3]["end"]] == ["RunPart", 1]
    assert difference.recorded[1][0][3]["end"] > 1


def test_an_event_that_came_otherwise_is_found_by_what_follows_from_it(recordings: dict[str, Path]) -> None:
    recording = [*records(recordings["SourceMachine"])]
    ran = next(i for i, record in enumerate(recording) if "Ran" in str(record.args) and record.name == "handle")
    event = recording[ran].args[0]
    assert event[3]["result"] == ["enum", "services.worker.core.live.source_words:Ran", "WELL"]
    event[3]["result"][2] = "FAILED"
    difference = Player().play(recording).difference
    assert difference is not None
    assert difference.index == ran
    assert "HasLanded(action=RunPart(" in difference.call
    assert [_name(new[2]) for new in difference.played[1]] == ["Conclude", "Done"]
