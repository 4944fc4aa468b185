"""Row ``pair``: prompts computed in one process and decoded in another, whose KV moves as the product moves it.

Each process has a GPU of its own where there are two, else both have the same. The tokens are those that one process
writes alone. There is no bus: the row says by a pipe what a worker is asked by messages.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from bench.gpu.engines import LLAMA_8B, EnginePlace, PlaceKind, blocks_for, engine_over, place_of, random_arena
from bench.gpu.figures import Report
from bench.gpu.forced import ForcedText, texts_of
from bench.gpu.holders import transport_on
from bench.gpu.processes import SecondProcess, second_process
from bench.gpu.served import GREEDY, prompt_of
from services.worker.device.completion import waited
from services.worker.engine.forward_batch import ForwardBatches, SamplingRow, Slice
from services.worker.engine.torch_engine import TorchEngine
from services.worker.kv_transfer.connector import KvConnector, KvRange
from shared.errors import Internal
from shared.model_spec import ModelSpec
from shared.transport.base import Channel
from shared.transport.tags import Carries, tag_of

MOVES = (
    "export_kv and import_kv in torch_engine.py, services/worker/kv_transfer/connector.py, staging memory; row tokens"
)
ARRIVAL_S = 30.0
SEED = 5
_ROW = SamplingRow(GREEDY, position=0)


@dataclass(frozen=True, slots=True)
class PairSettings:
    """Requests, and the model of both processes."""

    spec: ModelSpec = field(default_factory=lambda: msgspec.structs.replace(LLAMA_8B, num_layers=16))
    prompt_tokens: tuple[int, ...] = (17, 500, 1024, 3000)
    output_tokens: int = 64

    @property
    def num_blocks(self) -> int:
        """Of each engine."""
        return blocks_for(max(self.prompt_tokens) + self.output_tokens, len(self.prompt_tokens)) + 1

    def texts(self, first_tokens: Sequence[int] | None = None, *, backwards: bool = False) -> list[ForcedText]:
        """The prompts, and the token behind each where it is known. There are blocks for all that will be written."""
        prompts = [prompt_of(length, self.spec.vocab_size, seed) for seed, length in enumerate(self.prompt_tokens)]
        texts = texts_of(prompts, [(0,) * self.output_tokens] * len(prompts), backwards=backwards)
        for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            text.tokens = prompt if first_tokens is None else (*prompt, first_tokens[number])
        return texts


class GreedyBatch:
    """Requests of one engine that are computed together, by hand."""

    def __init__(self, engine: TorchEngine, texts: Sequence[ForcedText]) -> None:
        self.engine = engine
        self.texts = texts
        self._batches = ForwardBatches(engine.counts_of)

    def step(self) -> None:
        """All that is known and not computed, and a token more of each."""
        slices = [
            Slice(text.text_id, text.tokens[text.num_computed :], text.num_computed, text.blocks, _ROW)
            for text in self.texts
        ]
        activation = self.engine.embed(self._batches.of(slices))
        waited(self.engine.run_layers(activation, 0, self.engine.num_layers))
        for text, sampled in zip(self.texts, waited(self.engine.sample(activation)), strict=True):
            if sampled.error is not None:
                raise Internal(sampled.error.message)
            text.num_computed = len(text.tokens)
            text.tokens = (*text.tokens, sampled.token_id)

    def written(self, num_tokens: int) -> list[tuple[int, ...]]:
        """So many tokens of each."""
        while len(self.texts[0].tokens) < self.texts[0].num_prompt + num_tokens:
            self.step()
        return [text.tokens[text.num_prompt :] for text in self.texts]

    def kv(self) -> KvRange:
        """Of the prompts, all layers."""
        lengths = [text.num_prompt for text in self.texts]
        return KvRange.of([text.blocks for text in self.texts], lengths, range(self.engine.num_layers))


def _tags(num_layers: int) -> list[int]:
    """A message per layer."""
    return [tag_of(1, layer, Carries.KV_TO_DECODE) for layer in range(num_layers)]


def measure(report: Report) -> None:
    visible = another_first(torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    report.text("the second process", "another GPU" if visible else "the same GPU")
    measure_on(report, place_of("cuda", report.folder), PairSettings(), visible)


def another_first(num_gpus: int, visible: str | None) -> str | None:
    """What the second process is to see, of what this one does: another GPU before the first. None: there is one."""
    if num_gpus < 2:
        return None
    first, *others = visible.split(",") if visible else map(str, range(num_gpus))
    return ",".join((*others, first))


def measure_on(report: Report, place: EnginePlace, settings: PairSettings, visible: str | None = None) -> None:
    """On any device, of any size. ``visible``: the GPUs that the second process sees."""
    asyncio.run(_measure(report, place, settings, visible))


async def _measure(report: Report, place: EnginePlace, settings: PairSettings, visible: str | None) -> None:
    transport = transport_on(place, "prefill")
    try:
        layout, arena = random_arena(settings.spec, place, seed=SEED)
        engine = engine_over(layout, arena, place, settings.num_blocks)
        alone = GreedyBatch(engine, settings.texts()).written(settings.output_tokens)
        with second_process(_decode, place.kind, report.folder, settings, visible) as peer:
            address = await asyncio.to_thread(peer.answer)
            channel = await transport.connect(address, same_host=True)
            here = GreedyBatch(engine, settings.texts())
            here.step()
            peer.order((transport.address, [text.tokens[-1] for text in here.texts]))
            begin_s = time.perf_counter()
            written, moved_at_s = await _moved(here, peer, channel)
        num_bytes = here.kv().num_bytes(engine)
        rate = num_bytes / (moved_at_s - begin_s) / 1e9
        report.number("KV from blocks to blocks", rate, "GB/s", f"{num_bytes / 1e6:.1f} MB, a message per layer")
        num_wrong = sum(ours != theirs for ours, theirs in zip(alone, written, strict=True))
        note = f"of {len(alone)} requests of {settings.output_tokens} tokens"
        report.at_most("requests with other tokens than alone", num_wrong, "", 0, MOVES, note)
    finally:
        await transport.close()


async def _moved(here: GreedyBatch, peer: SecondProcess, channel: Channel) -> tuple[list[tuple[int, ...]], float]:
    """What the second process writes, and when it had the KV."""
    outflow = KvConnector.outflow(here.engine, channel)
    for sending in await outflow.send(here.kv(), _tags(here.engine.num_layers), lies_there=lambda: True):
        await sending.wait(ARRIVAL_S)
    await asyncio.to_thread(peer.answer)
    moved_at_s = time.perf_counter()
    written: list[tuple[int, ...]] = await asyncio.to_thread(peer.answer)
    return written, moved_at_s


def _decode(pipe: Connection, kind: PlaceKind, folder: Path, settings: PairSettings, visible: str | None) -> None:
    """The second process: answers with its address, then that it has the KV, then with what it writes."""
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    try:
        asyncio.run(_decode_moved(pipe, place_of(kind, folder), settings))
    except (EOFError, ConnectionError):  # the row is over
        return
    except Exception as error:  # noqa: BLE001 - the row reports it
        pipe.send(error)


async def _decode_moved(pipe: Connection, place: EnginePlace, settings: PairSettings) -> None:
    layout, arena = random_arena(settings.spec, place, seed=SEED)
    engine = engine_over(layout, arena, place, settings.num_blocks)
    transport = transport_on(place, "decode")
    pipe.send(transport.address)
    try:
        sender, first_tokens = await asyncio.to_thread(pipe.recv)
        channel = await transport.connect(sender, same_host=True)
        there = GreedyBatch(engine, settings.texts(first_tokens, backwards=True))
        pieces = list(there.kv().pieces(1))
        connector = KvConnector(transport, place.device)
        window = connector.reserve(pieces[0].num_bytes(engine), len(pieces))
        assert window is not None  # nothing else is on its way
        inflow = connector.inflow(engine, channel, window, timeout_s=ARRIVAL_S)
        for piece, tag in zip(pieces, _tags(engine.num_layers), strict=True):
            inflow.receive(piece, tag)
        await inflow.run(lambda: inflow.num_here == len(pieces))
        pipe.send("here")
        for text in there.texts:
            text.num_computed = text.num_prompt
        pipe.send(there.written(settings.output_tokens))
    finally:
        await transport.close()
