"""FlashInfer's own Python, as it is installed, with its compiled kernels played on the CPU: what its wrappers and
functions make of what the product gives them comes to the logits of transformers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.engine.attention.flashinfer import FlashInferAttention
from tests.checkpoints import KINDS
from tests.services.worker.engine.flashinfer_harness import (
    SCATTERED,
    assert_logits,
    attention_of,
    decode_of,
    loaded,
    made,
    run_on_flashinfer,
)
from tests.services.worker.engine.flashinfer_twin import FlashInferTwin, attended
from tests.services.worker.engine.harness import DrivenSequence, compute, prompt_of

MODULES = ("decode", "prefill", "norm", "activation", "rope")
CAUSAL, NHD = 1, 0


class Kernels:
    """The modules that the package compiles. What ``plan`` writes into a wrapper's workspace is known again by ``run``.

    Arguments are taken by their places, as C++ takes them (``batch_prefill.cu``, ``batch_prefill_paged.cuh``)."""

    def __init__(self, package: dict[str, ModuleType]) -> None:
        """``package``: modules of FlashInfer's, by name."""
        self._package = package
        self.compiled: list[tuple[Any, ...]] = []
        self.num_plans = 0
        self.graph_plans: list[bool] = []

    def put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        empty = torch.empty

        def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return empty(*args, **kwargs)

        monkeypatch.setattr(torch, "empty", unpinned)
        monkeypatch.setattr(self._package["decode"], "get_batch_prefill_module", self.attention)
        monkeypatch.setattr(self._package["prefill"], "get_batch_prefill_module", self.attention)
        functions = {"norm": self.rmsnorm, "act_and_mul": self.silu_and_mul}
        functions["rope"] = self.apply_rope_pos_ids_cos_sin_cache
        for name, module in (("norm", "norm"), ("act_and_mul", "activation"), ("rope", "rope")):
            compiled = SimpleNamespace(**{functions[name].__name__: functions[name]})
            monkeypatch.setattr(self._package[module], f"get_{name}_module", lambda *_, compiled=compiled: compiled)

    def attention(self, *args: Any) -> SimpleNamespace:
        self.compiled.append(args)
        return SimpleNamespace(plan=self.plan, paged_run=self.paged_run)

    def plan(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned_workspace: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        *args: Any,
    ) -> list[Any]:
        assert {x.dtype for x in (qo_indptr, kv_indptr, kv_lens)} == {torch.int32}
        total_num_rows, batch_size, _, _, page_size, enable_cuda_graph, _, _, causal, window_left, *split = args
        assert len(qo_indptr) == len(kv_indptr) == batch_size + 1
        assert int(qo_indptr[-1]) == total_num_rows
        assert split == [-1, False, 0, 0]
        assert pinned_workspace.shape == int_workspace.shape
        self.num_plans += 1
        self.graph_plans.append(enable_cuda_graph)
        pinned_workspace[0] = self.num_plans
        int_workspace.copy_(pinned_workspace)
        return [self.num_plans, batch_size, page_size, causal, window_left]

    def paged_run(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        plan_info: Sequence[Any],
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        pages: torch.Tensor,
        last_page_len: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        *args: Any,
    ) -> None:
        number, batch_size, page_size, causal, planned_window = plan_info
        assert int_workspace[0] == number, "another plan's workspace"
        assert (layout, bool(mask_mode == CAUSAL), window_left) == (NHD, causal, planned_window)
        assert lse is None
        assert len(kv_indptr) == batch_size + 1
        assert {x.dtype for x in (qo_indptr, kv_indptr, pages, last_page_len)} == {torch.int32}
        assert args[:2] == (None, None)
        _, _, _, _, _, _, soft_cap, sm_scale = args[:8]
        assert soft_cap == 0
        for i in range(batch_size):
            rows = slice(int(qo_indptr[i]), int(qo_indptr[i + 1]))
            own = pages[int(kv_indptr[i]) : int(kv_indptr[i + 1])].long()
            num_keys = (len(own) - 1) * page_size + int(last_page_len[i]) if len(own) else 0
            k, v = (cache[own].flatten(0, 1)[:num_keys] for cache in (k_cache, v_cache))
            out[rows] = attended(q[rows], k, v, sm_scale, causal, window_left)

    def rmsnorm(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: bool) -> None:
        out.copy_(torch.nn.functional.rms_norm(x, weight.shape, weight, eps))

    def silu_and_mul(self, out: torch.Tensor, x: torch.Tensor, enable_pdl: bool) -> None:
        gate, up = x.chunk(2, -1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    def apply_rope_pos_ids_cos_sin_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_out: torch.Tensor,
        k_out: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        interleave: bool,
    ) -> None:
        assert not interleave
        assert cos_sin.shape[1] == q.shape[-1]
        cos, sin = cos_sin[positions.long()][:, None].chunk(2, -1)
        for heads, out in ((q, q_out), (k, k_out)):
            low, high = heads.chunk(2, -1)
            out.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], -1))


@pytest.fixture(scope="module")
def package() -> dict[str, ModuleType]:
    """Imported here, since it takes seconds."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FLASHINFER_USE_CUDA_NORM", "1")  # and not the norms of CuTe, where that is installed
            return {name: importlib.import_module(f"flashinfer.{name}") for name in MODULES}
    except (ImportError, OSError) as error:
        pytest.skip(f"flashinfer-python is not installed, or cannot be imported: {error}")


@pytest.fixture
def played(package: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> Kernels:
    run_on_flashinfer(monkeypatch, torch.float32)
    FlashInferTwin().put_events(monkeypatch)
    played = Kernels(package)
    played.put(monkeypatch)
    return played


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_decodes_and_both_together(played: Kernels, kind: str) -> None:
    engine, tokens = loaded(kind), prompt_of(60)
    sequence, other = DrivenSequence(1, tokens[:40], SCATTERED), DrivenSequence(2, prompt_of(33), range(230, 240))
    while sequence.num_computed < 40:
        logits = compute(engine, [sequence.next_slice(17)])
    assert_logits(logits, kind, [tokens[:40]])
    for position in range(40, 60):
        sequence.tokens.append(tokens[position])
        together = [sequence.next_slice(), *([other.next_slice(30)] if position in (45, 46) else [])]
        logits = compute(engine, together)
        assert_logits(logits[:1], kind, [tokens[: position + 1]])
        if position == 46:
            assert_logits(logits[1:], kind, [other.tokens])
    window = {"mistral": 24}.get(kind)
    backend, dtypes, index, sizes, rest = (
        {args[:1] for args in played.compiled},
        {args[1:4] for args in played.compiled},
        {args[4] for args in played.compiled},
        {args[5:7] for args in played.compiled},
        {args[7:] for args in played.compiled},
    )
    assert backend == {("fa2",)}
    assert dtypes == {(torch.float32,) * 3}
    assert index == {torch.int32}
    assert sizes == {(24, 24) if window else (16, 16)}
    # No positions are encoded in it; one module for decodes and prompts.
    assert rest == {(0, window is not None, False, False)}
    assert attention_of(engine).decodes.num_plans + attention_of(engine).prefills.num_plans == played.num_plans


@pytest.mark.parametrize("window", [None, 12])
def test_plans_in_fixed_buffers(played: Kernels, window: int | None) -> None:
    backend, caches = made(window=window)
    fixed = backend.fixed(4, 6, torch.zeros(4).long())
    for lengths in ([5, 20, 8], [16], [1, 2, 3, 4], [33, 1]):
        batch = decode_of(lengths)
        pages = torch.from_numpy(batch.pages)
        q = torch.randn(4, 4, 16)
        expected = backend.run(backend.plan(batch, pages, fixed.attention.slots), q[: len(lengths)], *caches)
        fixed.plan(batch, pages)
        out = backend.run(fixed.attention, q, *caches)
        torch.testing.assert_close(out[: len(lengths)], expected)
        assert not out[len(lengths) :].any()
    assert played.graph_plans == [False, True] * 4
    assert isinstance(backend, FlashInferAttention)
