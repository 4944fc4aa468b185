"""A twin of FlashInfer 0.7.2 in PyTorch on the CPU, as far as the product calls it, and strict where a GPU is silent.

``put`` has it in the place of the package, and of the two things of PyTorch that need a GPU: pinned memory and events.
Attention is computed in float32 from what was planned, where a wrapper keeps it: a second plan on a wrapper changes
what ``run`` gives. A plan is copied to the device late: until an event behind it was waited for, or has passed, the
copy may still have to be made, and to plan on the wrapper again raises ``PinnedOverwritten``, where a GPU would compute
with parts of both. Every call is noted as it was made, to be bound to the signatures of the package.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from tests.services.worker.device.cuda.drivers import launch

HALVES = frozenset({torch.float16, torch.bfloat16})


class PinnedOverwritten(Exception):
    """A plan was written where the copy of an earlier one may still have to be made from."""


class Call(NamedTuple):
    """One of the product's."""

    function: str
    """In the package: ``module.function``, or ``module.Class.method``, whose first argument is the wrapper."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class FlashInferTwin:
    """The package, and the stream that its calls are in."""

    def __init__(self, *, dtypes: frozenset[torch.dtype] = HALVES, is_late: bool = False) -> None:
        """``dtypes``: those that it takes; float32 for tests that compare sharply. ``is_late``: an event has not passed
        before it was waited for, else as soon as somebody looks."""
        self.dtypes, self.is_late = dtypes, is_late
        self.calls: list[Call] = []
        self.moment = 0
        """Of the stream: each plan and each event has the next."""
        self.reached = 0
        """What was given to the stream up to here is known to be done."""
        self._pinned: dict[int, torch.Tensor] = {}
        """By the address of their memory, which is kept: nothing else comes to lie there."""

    def put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For the length of a test."""
        self.put_events(monkeypatch)
        functions: dict[str, dict[str, Callable[..., Any]]] = {
            "decode": {"BatchDecodeWithPagedKVCacheWrapper": partial(_Decode, self)},
            "prefill": {"BatchPrefillWithPagedKVCacheWrapper": partial(_Prefill, self)},
            "norm": {"rmsnorm": self.rmsnorm},
            "activation": {"silu_and_mul": self.silu_and_mul},
            "rope": {"apply_rope_with_cos_sin_cache_inplace": self.rope},
        }
        monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
        for name, contents in functions.items():
            module = types.ModuleType(f"flashinfer.{name}")
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def put_events(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And pinned memory, for PyTorch without a GPU."""

        def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
            copy = tensor.clone()
            self._pinned[copy.untyped_storage().data_ptr()] = copy
            return copy

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(torch.cuda, "Event", partial(_Event, self))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def note(self, function: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append(Call(function, args, kwargs))

    def check_host(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            assert tensor.dtype == torch.int32, "another type, which a GPU would read as int32"
            assert self.is_pinned(tensor), "a copy from unpinned memory"

    def check_device(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            assert tensor.dtype == torch.int32, "another type, which a GPU would read as int32"
            assert not self.is_pinned(tensor), "a copy that is waited for"

    def rmsnorm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.note("norm.rmsnorm", *args, **kwargs)
        x, weight, eps = args
        assert len(x), "a grid without blocks"
        assert x.stride(-1) == 1
        assert x.dtype == weight.dtype
        assert x.dtype in self.dtypes
        wide = x.float()
        normed: torch.Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        return normed.to(x.dtype)

    def silu_and_mul(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.note("activation.silu_and_mul", *args, **kwargs)
        (gate_up,) = args
        assert len(gate_up), "a grid without blocks"
        assert gate_up.is_contiguous(), "its strides are not read"
        assert gate_up.dtype in self.dtypes
        gate, up = gate_up.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    def rope(self, *args: Any, **kwargs: Any) -> None:
        self.note("rope.apply_rope_with_cos_sin_cache_inplace", *args, **kwargs)
        positions, query, key, head_size, cos_sin = args
        assert cos_sin.dtype == torch.float32
        assert cos_sin.is_contiguous()
        assert cos_sin.shape[1] == head_size
        assert positions.dtype in (torch.int32, torch.int64)
        assert len(positions) == len(query) == len(key) > 0
        cos, sin = cos_sin[positions.long()][:, None].chunk(2, -1)
        for heads in (query.view(len(query), -1, head_size), key.view(len(key), -1, head_size)):
            assert heads.stride(-1) == 1
            assert heads.dtype in self.dtypes
            low, high = heads.float().chunk(2, -1)
            heads.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], -1))


class _Event:
    """``torch.cuda.Event``."""

    def __init__(self, twin: FlashInferTwin) -> None:
        self._twin, self._moment = twin, 0

    def record(self) -> None:
        self._twin.moment += 1
        self._moment = self._twin.moment

    def query(self) -> bool:
        if not self._twin.is_late:
            self.synchronize()
        return self._moment <= self._twin.reached

    def synchronize(self) -> None:
        self._twin.reached = max(self._twin.reached, self._moment)


@dataclass
class _Plan:
    """What of a plan lies on the device."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    pages: torch.Tensor
    last_page_len: torch.Tensor
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    window_left: int
    sm_scale: float
    dtype: torch.dtype


class _Wrapper:
    """What both kinds do."""

    name: str

    def __init__(self, twin: FlashInferTwin, workspace: torch.Tensor, kv_layout: str, *, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        assert (kv_layout, backend) == ("NHD", "fa2")
        self._twin = twin
        self._plan: _Plan | None = None
        self._written = 0
        """When its last plan was: the copy out of pinned memory is behind that."""

    def _planned(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        pages: torch.Tensor,
        last_page_len: torch.Tensor,
        *sizes: int,
        causal: bool,
        pos_encoding_mode: str,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        seq_lens: torch.Tensor,
        non_blocking: bool,
    ) -> None:
        assert pos_encoding_mode == "NONE"
        assert non_blocking
        assert q_data_type == kv_data_type
        assert q_data_type in self._twin.dtypes
        num_qo_heads, num_kv_heads, head_dim, page_size = sizes
        self._twin.check_host(seq_lens)
        for indptr in (qo_indptr, kv_indptr):
            assert int(indptr[0]) == 0
            assert (indptr.diff() >= 0).all(), "should be non-negative"
        assert len(pages) >= int(kv_indptr[-1])
        assert torch.equal(seq_lens, (kv_indptr.diff() - 1).clamp(min=0) * page_size + last_page_len)
        if self._written > self._twin.reached:
            raise PinnedOverwritten(f"{self.name}: its plan of moment {self._written} may still have to be copied")
        self._twin.moment += 1
        self._written = self._twin.moment
        # Copied, but for the pages: those lie on the device, and are read where they do.
        on_device = (qo_indptr.clone(), kv_indptr.clone(), pages, last_page_len.clone())
        self._plan = _Plan(
            *on_device, num_qo_heads, num_kv_heads, head_dim, page_size, causal, window_left, sm_scale, q_data_type
        )

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._twin.note(f"{self.name}.run", self, *args, **kwargs)
        launch(lambda: self._run(*args, **kwargs))
        out: torch.Tensor = kwargs["out"]
        return out

    def _run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        plan = self._plan
        assert plan is not None, "plan info is not initialized"
        assert isinstance(caches, tuple)
        assert caches[0].stride() == caches[1].stride(), "another module is compiled"
        for cache in caches:
            assert cache.shape[1:] == (plan.page_size, plan.num_kv_heads, plan.head_dim)
        assert {x.dtype for x in (q, *caches, out)} == {plan.dtype}
        assert q.shape == out.shape == (int(plan.qo_indptr[-1]), plan.num_qo_heads, plan.head_dim)
        assert q.stride(-1) == 1
        assert out.is_contiguous()
        for i, last_page_len in enumerate(plan.last_page_len.tolist()):
            rows = slice(int(plan.qo_indptr[i]), int(plan.qo_indptr[i + 1]))
            pages = plan.pages[int(plan.kv_indptr[i]) : int(plan.kv_indptr[i + 1])].long()
            num_keys = (len(pages) - 1) * plan.page_size + last_page_len if len(pages) else 0
            k, v = (cache[pages].flatten(0, 1)[:num_keys] for cache in caches)
            out[rows] = attended(q[rows], k, v, plan.sm_scale, plan.causal, plan.window_left)


class _Decode(_Wrapper):
    name = "decode.BatchDecodeWithPagedKVCacheWrapper"

    def __init__(self, twin: FlashInferTwin, *args: Any, **kwargs: Any) -> None:
        twin.note(f"{self.name}.__init__", self, *args, **kwargs)
        buffers = [kwargs.pop(f"paged_kv_{name}_buffer", None) for name in ("indptr", "indices", "last_page_len")]
        self._fixed = buffers if kwargs.pop("use_cuda_graph", False) else None
        assert kwargs.pop("use_tensor_cores")
        super().__init__(twin, *args, **kwargs)
        if self._fixed is not None:
            twin.check_device(*self._fixed)
            assert len(self._fixed[0]) == len(self._fixed[2]) + 1

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._twin.note(f"{self.name}._plan_impl", self, *args, **kwargs)
        indptr, indices, last_page_len, *sizes = args
        self._twin.check_host(indptr, last_page_len)
        self._twin.check_device(indices)
        if self._fixed is not None:
            assert len(last_page_len) == len(self._fixed[2]), "the batch size should be fixed"
            assert len(indices) <= len(self._fixed[1]), "more indices than the buffer holds"
            self._fixed[0].copy_(indptr)
            self._fixed[1][: len(indices)].copy_(indices)
            self._fixed[2].copy_(last_page_len)
            indptr, indices, last_page_len = self._fixed
        rows = torch.arange(len(last_page_len) + 1)
        self._planned(rows, indptr, indices, last_page_len, *sizes, causal=False, **kwargs)


class _Prefill(_Wrapper):
    name = "prefill.BatchPrefillWithPagedKVCacheWrapper"

    def __init__(self, twin: FlashInferTwin, *args: Any, **kwargs: Any) -> None:
        twin.note(f"{self.name}.__init__", self, *args, **kwargs)
        super().__init__(twin, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._twin.note(f"{self.name}.plan", self, *args, **kwargs)
        self._twin.check_host(args[0], args[1], args[3])
        self._twin.check_device(args[2])
        self._planned(*args, **kwargs)


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, causal: bool, window_left: int
) -> torch.Tensor:
    """``[n, Hq, D]`` float32, of queries at the last of the keys ``[m, Hkv, D]``; zeros where there are none."""
    if not len(k):
        return torch.zeros(q.shape)
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * sm_scale
    queries = torch.arange(len(k) - len(q), len(k))[:, None]
    keys = torch.arange(len(k))[None]
    unseen = torch.zeros(len(q), len(k), dtype=torch.bool)
    if causal:
        unseen |= keys > queries
    if window_left >= 0:
        unseen |= keys < queries - window_left
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)
