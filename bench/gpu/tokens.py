"""Row ``tokens``: whether the engine computes on a GPU what ``transformers`` computes there.

Small random checkpoints of three kinds, each in float32, where attention is PyTorch's, and in bfloat16, where it is
FlashInfer's. The reference is float32 in both: of bfloat16 the engine may be off by twice what ``transformers`` is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import torch

from bench.gpu.checkpoints import KINDS, Kind, ModelSize, Reference, loaded_arena, write_checkpoint
from bench.gpu.engines import EnginePlace, blocks_for, engine_over, place_of, rehearse
from bench.gpu.figures import Report
from bench.gpu.forced import ForcedEngine, ForcedText, texts_of
from bench.gpu.served import GREEDY, ServedRequests, prompt_of
from services.worker.device.completion import waited
from services.worker.engine.torch_engine import TorchEngine
from services.worker.memory.arena import Arena
from shared.layout import ArenaLayout
from shared.model_spec import Dtype

FLOAT32_TOLERANCE = 1e-3
WHOLE = 1 << 20
"""Tokens at a time: all of a prompt."""
PREFILL = "services/worker/engine/attention (plan and run of prompts), models/llama.py, rope.py"
CHUNKS = "queries behind a prefix: places_of in services/worker/engine/placement.py, causal masks of the backend"
MIXED = "batches of prompts and decodes: qo_indptr and slots in placement.py, the backend's plan"
GRAPHS = "services/worker/engine/decode_graphs.py, the backend's fixed(), padding in placement.py"
LOOP = "tokens begun before they are known: the sampler's known() and token_ids(), the order of streams"
MOVES = "export_kv, import_kv, hidden_states and resume in torch_engine.py: streams, staging memory"


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """What is compared."""

    size: ModelSize = field(default_factory=ModelSize)
    kinds: tuple[Kind, ...] = KINDS
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    prompt_tokens: tuple[int, ...] = (1, 9, 33, 100, 129, 180)
    output_tokens: int = 64
    chunks: tuple[int, ...] = (16, 100)


@dataclass(frozen=True, slots=True)
class Expected:
    """What is right, by a reference in float32."""

    prompts: list[tuple[int, ...]]
    outputs: list[list[int]]
    """Greedily."""
    logits: list[torch.Tensor]
    """Of each prompt and its output ``[num_tokens, vocab_size]``, on the host."""
    exact: Reference
    tolerance: float
    """How far a logit may be off. Of two that are closer to each other either may be chosen."""

    def texts(self, *, backwards: bool = False) -> list[ForcedText]:
        return texts_of(self.prompts, self.outputs, backwards=backwards)


def worse_by(written: Sequence[int], prompt: Sequence[int], exact: Reference) -> torch.Tensor:
    """``[len(written)]``: how far each token's logit is below the largest, by the reference of what is before it."""
    logits = exact.logits((*prompt, *written))[len(prompt) - 1 : -1]
    return logits.amax(-1) - logits.gather(-1, torch.tensor(written)[:, None])[:, 0]


def measure(report: Report) -> None:
    measure_on(report, place_of("cuda", report.folder), TokenSettings())


def measure_on(report: Report, place: EnginePlace, settings: TokenSettings) -> None:
    """On any device, of any size."""
    for kind in settings.kinds:
        for dtype in settings.dtypes:
            name = f"{kind}, {dtype}"
            with report.part(name):
                path = write_checkpoint(report.folder / "checkpoints" / f"{kind}-{dtype}", kind, dtype, settings.size)
                expected = _expected(report, name, Reference(path, "float32", place), settings)
                if dtype != "float32":
                    tolerance = _tolerance(report, name, Reference(path, dtype, place), expected)
                    expected = replace(expected, tolerance=tolerance)
                _Comparison(report, name, place, settings, expected, *loaded_arena(path, place)).run()


def _expected(report: Report, name: str, exact: Reference, settings: TokenSettings) -> Expected:
    sizes = settings.prompt_tokens
    prompts = [prompt_of(num_tokens, settings.size.vocab_size, seed) for seed, num_tokens in enumerate(sizes)]
    outputs = [exact.greedy(prompt, settings.output_tokens) for prompt in prompts]
    logits = [exact.logits((*prompt, *output)) for prompt, output in zip(prompts, outputs, strict=True)]
    report.number(f"{name}: spread of logits", float(torch.cat(logits).std()), "", "their standard deviation")
    return Expected(prompts, outputs, logits, exact, FLOAT32_TOLERANCE)


def _tolerance(report: Report, name: str, own: Reference, expected: Expected) -> float:
    texts = zip(expected.prompts, expected.outputs, expected.logits, strict=True)
    worst = max(float((own.logits((*prompt, *output)) - exact).abs().max()) for prompt, output, exact in texts)
    report.number(f"{name}: transformers' own worst error", worst, "", "of a logit, against itself in float32")
    return 2 * worst


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Of one checkpoint."""

    report: Report
    name: str
    place: EnginePlace
    settings: TokenSettings
    expected: Expected
    layout: ArenaLayout
    arena: Arena

    def run(self) -> None:
        """Without graphs first: an engine of the same places has those that were recorded."""
        engine, texts = self._engine(), self.expected.texts
        forced = self._forced(engine)
        self._error("whole prompts", lambda: forced.alone(texts(), WHOLE), PREFILL)
        for chunk in self.settings.chunks:
            self._error(f"prompts in chunks of {chunk}", partial(forced.alone, texts(), chunk), CHUNKS)
        self._error("whole prompts together", lambda: forced.together(texts(), WHOLE), MIXED)
        self._error("decodes beside prompts", lambda: forced.together(texts(), 16, apart=3), MIXED)
        self._error("blocks backwards", lambda: forced.together(texts(backwards=True), WHOLE), MIXED)
        self._greedy("greedily, in the loop", engine, LOOP)
        other = self._forced(self._engine())
        for num_layers in sorted({1, self.layout.num_layers - 1}):
            split = partial(self._split, forced, other, num_layers)
            self._error(f"resumed elsewhere after layer {num_layers}", split, MOVES)
        self._error("decoded elsewhere", lambda: self._decoded_elsewhere(forced, other), MOVES)
        if not engine.rehearses:
            self.report.text(f"{self.name}: rehearsals", "none: this device records nothing")
            return
        num_rehearsals = len(rehearse(engine))
        self._error("whole prompts together, graphs", lambda: forced.together(texts(), WHOLE), GRAPHS)
        num_rehearsals += len(rehearse(engine))  # of the batch sizes that have come
        self._error("decodes beside prompts, graphs", lambda: forced.together(texts(), 16, apart=3), GRAPHS)
        self._greedy("greedily, in the loop, graphs", engine, GRAPHS)
        self.report.number(f"{self.name}: rehearsals", num_rehearsals, "", "of graphs and prompts")

    def _engine(self) -> TorchEngine:
        longest = max(self.settings.prompt_tokens) + self.settings.output_tokens
        num_blocks = blocks_for(longest, len(self.settings.prompt_tokens)) + 1
        return engine_over(self.layout, self.arena, self.place, num_blocks)

    def _forced(self, engine: TorchEngine) -> ForcedEngine:
        return ForcedEngine(engine, self.place, self.expected.logits)

    def _error(self, what: str, compare: Callable[[], float], look: str) -> None:
        name = f"{self.name}: {what}"
        with self.report.part(name):
            self.report.at_most(name, compare(), "", self.expected.tolerance, look, "worst error of a logit")

    def _greedy(self, what: str, engine: TorchEngine, look: str) -> None:
        name = f"{self.name}: {what}"
        with self.report.part(name):
            served, expected = ServedRequests(engine), self.expected
            for number, prompt in enumerate(expected.prompts):
                served.add(str(number), prompt, msgspec.structs.replace(GREEDY, max_tokens=self.settings.output_tokens))
            written = [served.run()[str(number)] for number in range(len(expected.prompts))]
            worse = [worse_by(*pair, expected.exact) for pair in zip(written, expected.prompts, strict=True)]
            num_wrong = int((torch.cat(worse) >= expected.tolerance).sum())
            pairs = zip(expected.outputs, written, strict=True)
            num_equal = sum(a == b for right, found in pairs for a, b in zip(right, found, strict=True))
            note = f"of {sum(map(len, written))} tokens not among the likeliest; {num_equal} are as transformers writes"
            self.report.at_most(name, num_wrong, "", 0, look, note)

    def _split(self, ours: ForcedEngine, other: ForcedEngine, num_layers: int) -> float:
        """Prompts that run their first layers here and the others there, and go on there."""
        here, there = self.expected.texts(), self.expected.texts(backwards=True)
        activation = ours.engine.embed(ours.batches.of([text.next_slice(WHOLE) for text in here]))
        waited(ours.engine.run_layers(activation, 0, num_layers))
        hidden = waited(ours.engine.hidden_states(activation))
        slices = [text.next_slice(WHOLE) for text in there]
        resumed = other.engine.resume(other.batches.of(slices), hidden, next_layer=num_layers)
        self._move_kv(ours, other, here, there, num_layers)
        waited(other.engine.run_layers(resumed, num_layers, other.engine.num_layers))
        return max(other.error_of(resumed, slices), other.together(there, 1))

    def _decoded_elsewhere(self, ours: ForcedEngine, other: ForcedEngine) -> float:
        here, there = self.expected.texts(), self.expected.texts(backwards=True)
        for texts in (here, there):
            slices = [text.next_slice(WHOLE) for text in texts]
            if texts is here:
                ours.step(slices)
        self._move_kv(ours, other, here, there, ours.engine.num_layers)
        return other.together(there, 1)

    def _move_kv(
        self,
        ours: ForcedEngine,
        other: ForcedEngine,
        here: Sequence[ForcedText],
        there: Sequence[ForcedText],
        num_layers: int,
    ) -> None:
        lengths = [text.num_prompt for text in here]
        kv = waited(ours.engine.export_kv([text.blocks for text in here], lengths, num_layers))
        waited(other.engine.import_kv([text.blocks for text in there], lengths, num_layers, kv))
