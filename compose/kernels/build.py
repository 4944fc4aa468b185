"""One kernel after the other, each put into place when it is whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from compose.kernels.toolkit import cuda_home, cuda_release
from services.worker.engine.prebuilt_kernels import SHARED_KERNELS, AttentionKernel, BuiltFor, built_for
from shared.errors import BadRequest


def wanted(
    dtypes: Sequence[str], head_dims: Sequence[int], windows: Sequence[bool], backends: Sequence[str]
) -> tuple[AttentionKernel, ...]:
    """Every combination. Raises ``BadRequest`` for dtypes and backends that there are not."""
    return tuple(
        AttentionKernel(dtype, head_dim, window, backend)
        for backend, dtype, head_dim, window in product(backends, dtypes, head_dims, windows)
    )


def build(
    attention: Sequence[AttentionKernel],
    out: Path,
    capabilities: tuple[str, ...],
    work: Path,
    *,
    only: Sequence[str] | None = None,
) -> int:
    """Have the shared modules and these, or ``only`` some of them by name, in ``out`` for all ``capabilities``; says
    what it does, and how long it took.

    1 if a module could not be built, with the compiler's words: the others are. Raises ``BadRequest`` where there is
    no compiler, and for names that are none.
    """
    cuda = cuda_home(work / "cuda")
    release = cuda_release(cuda)
    _set_environment(cuda, capabilities, work)
    import flashinfer

    made_with = BuiltFor(capabilities, flashinfer.__version__, release)
    recipes = _recipes(attention)
    if unknown := set(only or ()) - set(recipes):
        names = f"{', '.join(SHARED_KERNELS)}, and those of attention by their whole names"
        raise BadRequest(f"no such kernel: {', '.join(sorted(unknown))}; there are {names}", param="only")
    recipes = {name: recipe for name, recipe in recipes.items() if only is None or name in only}
    num_failed = 0
    for number, (name, recipe) in enumerate(recipes.items(), 1):
        step = f"{number}/{len(recipes)} {name}"
        if built_for(out, name) == made_with:
            _say(f"{step}: is there")
            continue
        _say(f"{step}: for {', '.join(capabilities)} with CUDA {release} ...")
        began_s = time.monotonic()
        try:
            library = _compiled(recipe(), name)
        except RuntimeError as error:
            num_failed += 1
            _say(f"{step}: failed\n{error}")
            continue
        _put(library, out / name, made_with)
        _say(f"{step}: {time.monotonic() - began_s:.0f} s, {library.stat().st_size / 1e6:.1f} MB")
    return 1 if num_failed else 0


def _set_environment(cuda: Path, capabilities: Sequence[str], work: Path) -> None:
    """What FlashInfer reads when it is imported; its ``ninja`` may be beside this Python."""
    os.environ.pop("FLASHINFER_DISABLE_JIT", None)
    os.environ |= {
        "CUDA_HOME": str(cuda),
        "FLASHINFER_CUDA_ARCH_LIST": " ".join(capabilities),
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
    }


def _recipes(attention: Sequence[AttentionKernel]) -> dict[str, Callable[[], Any]]:
    """FlashInfer's own, by the name of the module that comes of it."""
    from flashinfer.jit.activation import gen_act_and_mul_module
    from flashinfer.jit.rope import gen_rope_module

    shared: dict[str, Callable[[], Any]] = {
        "silu_and_mul": lambda: gen_act_and_mul_module("silu"),
        "rope": gen_rope_module,
    }
    recipes = {name: shared[name] for name in SHARED_KERNELS}
    return recipes | {kernel.name: lambda kernel=kernel: _of_attention(kernel) for kernel in attention}


def _of_attention(kernel: AttentionKernel) -> Any:
    import torch
    from flashinfer.aot import gen_fa2, gen_fa3

    dtype, dim, window = getattr(torch, kernel.dtype), kernel.head_dim, kernel.sliding_window
    if kernel.backend == "fa3":
        [spec] = gen_fa3(dtype, dtype, dtype, dim, dim, window, use_logits_soft_cap=False)
    else:
        [spec] = gen_fa2(dtype, dtype, dim, dim, window, use_logits_soft_cap=False, prefill_only=True)
    return spec


def _compiled(spec: Any, name: str) -> Path:
    """The library. Raises ``RuntimeError`` with the compiler's words, and ``BadRequest`` for another FlashInfer, whose
    modules have other names."""
    if spec.name != name:
        raise BadRequest(f"this FlashInfer has {spec.name} where {name} was expected")
    spec.build()
    library = Path(spec.jit_library_path)
    subprocess.run(["strip", "--strip-unneeded", library], check=True)
    return library


def _put(library: Path, folder: Path, made_with: BuiltFor) -> None:
    """What it was made with comes last: a module without that is built again."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "built.json").unlink(missing_ok=True)
    aside = folder / f".{library.name}"
    shutil.copyfile(library, aside)
    aside.rename(folder / library.name)
    made_with.write(folder)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
