"""What one request with a schema costs those beside it: their steps with it and without, in turn."""

from __future__ import annotations

import json
import queue
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import msgspec

from bench.engine.run import BLOCK_SIZE, GREEDY, EngineBenchSettings, prompts_of
from bench.engine.sampling import random_engine
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.forward_batch import Bits
from services.worker.engine.grammar.compiler import GrammarCompiler
from services.worker.engine.grammar.guidance import GrammarGuides
from services.worker.engine.loop import EngineLoop
from services.worker.engine.torch_engine import TorchEngine
from shared.errors import Internal
from shared.messages.common import ErrorInfo
from shared.messages.generation import Grammar

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
SCHEMA = {
    "type": "array",
    "minItems": 50,
    "items": {"anyOf": [{"type": "string", "pattern": "^[a-z ]*$"}, {"type": "integer"}, {"enum": ["red", "green"]}]},
}
"""No answer of a bench run becomes whole."""
GUIDED = msgspec.structs.replace(GREEDY, grammar=Grammar(kind="json_schema", text=json.dumps(SCHEMA)))


@dataclass(frozen=True, slots=True)
class GuidedResult:
    """Medians over the rounds."""

    vocab_size: int
    step_ms: float
    """Of a batch of which nobody has a schema, while all of it decodes."""
    with_one: float
    """The same of a batch of as many of which one has, over that: the others' steps."""
    slowest_mask_ms: float
    guided_tokens: float
    """That the one got for each of the others'."""


def vocabulary(size: int) -> bytes:
    """A ``tokenizer.json`` of all bytes, and words of letters behind them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    names = [chr(byte) for byte in printable] + [chr(256 + number) for number in range(len(hidden))]
    words = (a + b + c + d for a in _LETTERS for b in _LETTERS for c in _LETTERS for d in _LETTERS)
    names += [next(words) for _ in range(size - len(names))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {name: number for number, name in enumerate(names)}, "merges": []}
    return json.dumps({"version": "1.0", "added_tokens": [], "decoder": level, "model": model}).encode()


def measure_guided(settings: EngineBenchSettings, progress: Callable[[str], None]) -> list[GuidedResult]:
    """For each vocabulary."""
    results = []
    for vocab_size in settings.sampling_vocab_sizes:
        progress(f"measuring one request with a schema beside others: {vocab_size} tokens")
        results.append(_measure(replace(settings, vocab_size=vocab_size)))
    return results


def _measure(settings: EngineBenchSettings) -> GuidedResult:
    engine = random_engine(settings, "flat")
    compiler = GrammarCompiler(vocabulary(settings.vocab_size), vocab_size=settings.vocab_size, end_ids=(0,))
    prompts = prompts_of(settings, settings.sampling_batch_size)
    plain, ratios, masks, tokens = [], [], [0.0], []
    for number in range(settings.repetitions + 1):
        without_s, _, _ = _run(engine, compiler, prompts, settings.output_tokens, guided=False)
        with_s, mask_s, share = _run(engine, compiler, prompts, settings.output_tokens, guided=True)
        if number:  # the first round compiles
            plain.append(without_s)
            ratios.append(with_s / without_s)
            masks.append(mask_s)
            tokens.append(share)
    return GuidedResult(
        settings.vocab_size,
        statistics.median(plain) * 1000,
        statistics.median(ratios),
        max(masks) * 1000,
        statistics.median(tokens),
    )


def _run(
    engine: TorchEngine, compiler: GrammarCompiler, prompts: Sequence[list[int]], num_tokens: int, *, guided: bool
) -> tuple[float, float, float]:
    """Seconds per step of the others, while all of them decode; the longest that a mask took; tokens of the last
    request per token of the others."""
    loop = EngineLoop(engine, SchedulerConfig(num_blocks=engine.num_blocks, block_size=BLOCK_SIZE), time.perf_counter)
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    guides = _TimedGuides(lambda: compiler, lambda: woken.put(None))
    loop.scheduler.table.guide = guides.guide
    last = len(prompts) - 1
    counts = [0] * len(prompts)
    for index, prompt in enumerate(prompts):
        params = GUIDED if guided and index == last else GREEDY
        own = msgspec.structs.replace(params, max_tokens=num_tokens, seed=index)
        loop.add(ActiveSequence(request_id=str(index), attempt=1, gateway_id="bench", prompt=tuple(prompt), params=own))
    begun_s = ended_s = 0.0
    while loop.has_work:
        step = loop.step()
        if step is None:
            woken.get(timeout=60)
            continue
        for output in step.outputs:
            if output.error is not None:
                raise Internal(f"request {output.request_id} failed: {output.error.message}")
            counts[int(output.request_id)] += len(output.token_ids)
        if not begun_s and min(counts[:last]) >= 1:
            begun_s, first = time.perf_counter(), counts[0]
        if not ended_s and max(counts[:last]) >= num_tokens:
            ended_s, share = time.perf_counter(), counts[last] / num_tokens
    return (ended_s - begun_s) / (num_tokens - first), guides.longest_s, share


class _TimedGuides(GrammarGuides):
    longest_s = 0.0

    def submit(self, work: Callable[[], Bits | ErrorInfo]) -> Future[Bits | ErrorInfo]:
        def timed() -> Bits | ErrorInfo:
            began_s = time.thread_time()
            try:
                return work()
            finally:
                self.longest_s = max(self.longest_s, time.thread_time() - began_s)

        return super().submit(timed)
