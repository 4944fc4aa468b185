"""``python -m compose.kernels [OUT]``: compile FlashInfer's kernels ahead, without a GPU.

One module at a time, and only what OUT does not have yet, so that it may be stopped and started again: a module of
attention takes minutes. OUT is where FlashInfer looks, unless it is named. Needs FlashInfer, torch, a C++ compiler and
CUDA's (docs/gpu.md), of the CUDA of the torch that will load what comes of it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compose.kernels.build import build, wanted
from services.worker.engine.prebuilt_kernels import DTYPES, SHARED_KERNELS, installed_flashinfer, is_capability
from shared.errors import BadRequest

CAPABILITIES = ("8.0", "9.0a")
"""A100 and what code for it runs on (8.6, 8.9), and H100. ``10.0a`` and ``12.0f`` need CUDA 12.9."""
HEAD_DIMS = (64, 128)
WINDOWS = {"both": (False, True), "no": (False,), "yes": (True,)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compose.kernels", description=__doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--arch", type=_capabilities, default=CAPABILITIES, help=f"default: {','.join(CAPABILITIES)}")
    parser.add_argument("--dtype", type=_names, default=tuple(DTYPES), help=f"default: {','.join(DTYPES)}")
    parser.add_argument("--head-dims", type=_numbers, default=HEAD_DIMS, help="default: 64,128")
    parser.add_argument("--windows", choices=WINDOWS, default="both", help="attention with a sliding window?")
    parser.add_argument("--backends", type=_names, default=("fa2",), help="default: fa2; fa3 is for 9.0a alone")
    parser.add_argument("--only", type=_names, help=f"of {', '.join(SHARED_KERNELS)} and those of attention, by name")
    parser.add_argument("--work", type=Path, help="keep sources and objects there, not in OUT/.work")
    asked = parser.parse_args(arguments)
    installed = installed_flashinfer()
    if installed is None:
        sys.stderr.write("FlashInfer is not installed: pip install flashinfer-python\n")
        return 1
    out = (asked.out or installed.kernels).resolve()
    try:
        attention = wanted(asked.dtype, asked.head_dims, WINDOWS[asked.windows], asked.backends)
        return build(attention, out, asked.arch, (asked.work or out / ".work").resolve(), only=asked.only)
    except BadRequest as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _capabilities(text: str) -> tuple[str, ...]:
    names = _names(text)
    if wrong := [name for name in names if not is_capability(name)]:
        raise argparse.ArgumentTypeError(f"no compute capability: {', '.join(map(repr, wrong))}; such as 8.0,9.0a")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    raise SystemExit(main())
