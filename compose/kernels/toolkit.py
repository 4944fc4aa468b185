"""CUDA's compiler: that of a toolkit, or of PyPI's wheels laid out as one."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from shared.errors import BadRequest

DRIVER_STUB = "/* Nothing here calls the driver by itself: libcudart finds it. */\n"
"""A linker script, for ``-lcuda``: what is linked asks for no driver, and loads where there is none."""
WHEELS = "nvidia-cuda-nvcc, nvidia-cuda-crt, nvidia-nvvm and nvidia-cuda-runtime"


def cuda_home(folder: Path) -> Path:
    """A folder with ``bin/nvcc``, ``include`` and ``lib64``: ``CUDA_HOME``; or the wheels', laid out so in ``folder``;
    or the toolkit of an ``nvcc`` on the path. Raises ``BadRequest`` where there is none."""
    if home := os.environ.get("CUDA_HOME"):
        return Path(home)
    spec = importlib.util.find_spec("nvidia")
    for root in () if spec is None else spec.submodule_search_locations or ():
        for wheels in sorted(Path(root).glob("cu*")):
            if (wheels / "bin" / "nvcc").is_file():
                return _laid_out(wheels, folder)
    if nvcc := shutil.which("nvcc"):
        tried = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
        if top := re.search(r"^#\$ TOP=(.+)$", tried.stderr, re.MULTILINE):
            return Path(top[1]).resolve()
    raise BadRequest(f"no compiler of CUDA: set CUDA_HOME, or pip install {WHEELS}, of one version")


def _laid_out(wheels: Path, folder: Path) -> Path:
    """FlashInfer links with ``-L$CUDA_HOME/lib64 -lcudart -lcuda``; the wheels have neither name, and no driver."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("include", "lib64"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "nvvm", "lib"):
        (folder / name).symlink_to(wheels / name)
    for header in (wheels / "include").iterdir():
        (folder / "include" / header.name).symlink_to(header)
    for library in (wheels / "lib").iterdir():
        (folder / "lib64" / library.name).symlink_to(library)
        if library.name.startswith("libcudart.so."):
            (folder / "lib64" / "libcudart.so").symlink_to(library)
    (folder / "lib64" / "libcuda.so").write_text(DRIVER_STUB, encoding="utf-8")
    return folder


def cuda_release(home: Path) -> str:
    """``13.0``. Raises ``BadRequest`` if its compiler is not there, or does not say."""
    try:
        said = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BadRequest(f"no compiler of CUDA at {home}/bin/nvcc: {error.strerror}; look at CUDA_HOME") from error
    found = re.search(r"release (\d+\.\d+),", said.stdout)
    if found is None:
        raise BadRequest(f"{home}/bin/nvcc does not say its release: {(said.stdout + said.stderr).strip()[:200]}")
    return found[1]
