"""What the host does per step: the bench end to end, and the device that it measures beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from bench.engine.host import HostBenchSettings, run_host_bench
from bench.engine.null_engine import TOKEN_ID, NullEngine, StreamBehind
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import HOST_STREAMS, Stream
from services.worker.engine.base import Activation, Engine
from services.worker.engine.forward_batch import ForwardBatch
from services.worker.engine.loop import EngineLoop, StepOutput
from shared.messages.generation import SamplingParams

SMALL = HostBenchSettings(
    sequences=(1, 5), context_tokens=40, output_tokens=6, num_layers=2, steps=20, repetitions=2, max_batch_tokens=64
)
BLOCK_SIZE = 4


def test_each_number_of_sequences_is_measured_and_the_report_is_written(tmp_path: Path) -> None:
    report = run_host_bench(tmp_path / "host.json", SMALL)
    assert json.loads((tmp_path / "host.json").read_text()).keys() == report.keys()
    rows = report["host"]
    assert [(row["sequences"], row["ahead"]) for row in rows] == [(1, False), (1, True), (5, False), (5, True)]
    assert report["us_per_step"] == {
        str(row["sequences"]): round(row["us_per_step"], 1) for row in rows if not row["ahead"]
    }
    for row in rows:
        assert row["us_per_step"] > 0
        assert row["decode_us"] > 0
        assert row["prompt_us"] > 0
        assert row["event_loop_us_per_step"] > 0
        assert 0 < row["prompt_steps"] < 1, "requests come while others decode"
        assert 0 < row["decodes_per_step"] <= row["sequences"]


def test_what_breaks_the_loop_breaks_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_loop: EngineLoop) -> StepOutput | None:
        raise ArithmeticError("a step that cannot be")

    monkeypatch.setattr(EngineLoop, "step", breaks)
    with pytest.raises(Exception, match="a step that cannot be"):
        run_host_bench(None, SMALL)


def test_a_device_that_is_behind_has_done_an_operation_once_the_next_is_given() -> None:
    stream, seen = StreamBehind(), []
    first = stream.run(lambda: seen.append(1) or 7)
    first.then(lambda: seen.append(2))
    assert (first.done, first.ahead(), seen) == (False, 7, [1])
    second = stream.run(lambda: 8)
    assert (first.done, first.result(), second.done, seen) == (True, 7, False, [1, 2])
    stream.catch_up()
    assert second.result() == 8
    stream.catch_up(ends=True)
    assert stream.run(lambda: 9).done


class _Seen(NullEngine):
    """Remembers its batches."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(num_layers=2, num_blocks=64, block_size=BLOCK_SIZE, stream=stream)
        self.batches: list[ForwardBatch] = []

    def embed(self, batch: ForwardBatch) -> Activation:
        self.batches.append(batch)
        return super().embed(batch)


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_are_made_ahead_of_their_tokens_where_the_device_is_behind(*, ahead: bool) -> None:
    behind = StreamBehind()
    engine = _Seen(behind if ahead else HOST_STREAMS.compute)
    loop = EngineLoop(cast(Engine, engine), SchedulerConfig(num_blocks=64, block_size=BLOCK_SIZE), lambda: 0.0)
    params = SamplingParams(max_tokens=4, seed=0)
    loop.add(ActiveSequence(request_id="r", attempt=1, gateway_id="g", prompt=(5, 6), params=params))
    written: list[int] = []
    while loop.has_work:
        output = loop.step()
        if output is None:
            behind.catch_up()
            continue
        written += [token_id for part in output.outputs for token_id in part.token_ids]
    assert written == [TOKEN_ID] * 4
    unknown = [piece.token_from is not None for batch in engine.batches for piece in batch.slices]
    assert unknown == [False, ahead, ahead, ahead]
