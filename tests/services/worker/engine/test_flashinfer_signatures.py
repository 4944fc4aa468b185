"""What the product calls of FlashInfer, bound to the signatures of the package itself, which is read and not imported:
it takes a GPU's driver and a dozen packages to import."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.engine.attention import flashinfer, flashinfer_wrappers
from tests.services.worker.engine.flashinfer_harness import attention_of, decode_of, loaded, put_twin
from tests.services.worker.engine.flashinfer_twin import FlashInferTwin
from tests.services.worker.engine.harness import DrivenSequence, compute, prompt_of

FOLDER = "FLASHINFER_FOLDER"
"""Environment: where the package lies, if it is not installed: the folder that has ``decode.py``."""
VERSION = "0.7.2"
CALLED = {
    "decode.BatchDecodeWithPagedKVCacheWrapper.__init__",
    "decode.BatchDecodeWithPagedKVCacheWrapper._plan_impl",
    "decode.BatchDecodeWithPagedKVCacheWrapper.run",
    "prefill.BatchPrefillWithPagedKVCacheWrapper.__init__",
    "prefill.BatchPrefillWithPagedKVCacheWrapper.plan",
    "prefill.BatchPrefillWithPagedKVCacheWrapper.run",
    "norm.rmsnorm",
    "activation.silu_and_mul",
    "rope.apply_rope_with_cos_sin_cache_inplace",
}


def package_folder() -> Path | None:
    told = os.environ.get(FOLDER)
    if told is not None:
        return Path(told)
    spec = importlib.util.find_spec("flashinfer")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


# Once, before a twin is put in its place.
PACKAGE = package_folder()
pytestmark = pytest.mark.skipif(PACKAGE is None, reason=f"flashinfer-python is not installed, and {FOLDER} is not set")


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> FlashInferTwin:
    """Which has seen every kind of call that the product makes."""
    twin = put_twin(monkeypatch, torch.float32)
    engine, sequence = loaded("mistral"), DrivenSequence(1, prompt_of(20), range(10))
    for _ in range(2):
        compute(engine, [sequence.next_slice()])
        sequence.tokens.append(3)
    batch = decode_of([20])
    attention_of(engine).fixed(2, 4, torch.zeros(2).long()).plan(batch, torch.from_numpy(batch.pages))
    return twin


def test_every_call_fits_the_signature_of_the_package(twin: FlashInferTwin) -> None:
    assert {call.function for call in twin.calls} == CALLED
    for call in twin.calls:
        signature_of(call.function).bind(*call.args, **call.kwargs)


@pytest.mark.parametrize("function", sorted(CALLED))
def test_a_call_with_an_argument_that_there_is_not_is_found(function: str) -> None:
    signature = signature_of(function)
    with pytest.raises(TypeError, match="no_such"):
        signature.bind(*[None] * num_required(signature), no_such=1)


def test_plan_gives_all_that_it_is_told_to_what_it_is_bound_to_here() -> None:
    # ``plan(..., **kwargs)`` takes any keyword: those of ``_plan_impl`` count.
    called = [ast.unparse(node) for node in ast.walk(function_of(f"{DECODE}.plan")) if isinstance(node, ast.Call)]
    assert any(call.startswith("self._plan_impl(indptr, indices, last_page_len, ") for call in called)
    assert any(call.endswith("page_size, **kwargs)") for call in called)


def test_a_wrapper_without_a_graph_keeps_pages_where_they_lie_and_takes_lengths_as_they_are() -> None:
    decode, prefill = (ast.unparse(function_of(f)) for f in (f"{DECODE}._plan_impl", f"{PREFILL}.plan"))
    assert "self._paged_kv_indices_buf = indices.to(self.device, non_blocking=non_blocking)" in decode
    assert "self._paged_kv_indices_buf = paged_kv_indices.to(self.device, non_blocking=non_blocking)" in prefill
    assert "kv_lens_arr_host = seq_lens.cpu().to(torch.int32)" in decode
    assert "kv_lens_arr_host = seq_lens.cpu().flatten().to(torch.int32)" in prefill


def test_what_a_plan_is_written_into_is_each_wrapper_s_own() -> None:
    for wrapper in (DECODE, PREFILL):
        made = ast.unparse(function_of(f"{wrapper}.__init__"))
        assert "self._int_workspace_buffer = torch.empty((8 * 1024 * 1024,)" in made
        assert "self._pin_memory_int_workspace_buffer = torch.empty(" in made


def test_the_version_is_the_one_that_was_read() -> None:
    assert PACKAGE is not None
    assert f'__version__ = "{VERSION}"' in (PACKAGE / "_build_meta.py").read_text()
    for module in (flashinfer_wrappers, flashinfer):
        assert module.__doc__ is not None
    assert f"FlashInfer {VERSION}" in (flashinfer_wrappers.__doc__ or "")


DECODE = "decode.BatchDecodeWithPagedKVCacheWrapper"
PREFILL = "prefill.BatchPrefillWithPagedKVCacheWrapper"


@cache
def tree_of(module: str) -> ast.Module:
    assert PACKAGE is not None
    file = PACKAGE / f"{module}.py"
    return ast.parse((file if file.exists() else PACKAGE / module / "__init__.py").read_text())


def function_of(path: str) -> ast.FunctionDef:
    """``module.function`` or ``module.Class.method``: the last definition, which is the one behind its overloads."""
    module, *names = path.split(".")
    found: ast.AST = tree_of(module)
    for name in names:
        body: list[ast.stmt] = getattr(found, "body", [])
        found = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name][-1]
    assert isinstance(found, ast.FunctionDef)
    return found


def signature_of(path: str) -> inspect.Signature:
    """With a default wherever there is one."""
    args = function_of(path).args
    positional = [*args.posonlyargs, *args.args]
    num_required = len(positional) - len(args.defaults)
    parameters = [
        parameter(arg.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, index >= num_required)
        for index, arg in enumerate(positional)
    ]
    if args.vararg is not None:
        parameters.append(parameter(args.vararg.arg, inspect.Parameter.VAR_POSITIONAL, False))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters.append(parameter(arg.arg, inspect.Parameter.KEYWORD_ONLY, default is not None))
    if args.kwarg is not None:
        parameters.append(parameter(args.kwarg.arg, inspect.Parameter.VAR_KEYWORD, False))
    return inspect.Signature(parameters)


def parameter(name: str, kind: Any, has_default: bool) -> inspect.Parameter:
    return inspect.Parameter(name, kind, default=None if has_default else inspect.Parameter.empty)


def num_required(signature: inspect.Signature) -> int:
    return sum(
        p.kind is p.POSITIONAL_OR_KEYWORD and p.default is inspect.Parameter.empty
        for p in signature.parameters.values()
    )
