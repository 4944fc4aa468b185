"""``python -m bench.gpu.pack {flashinfer,ucxx} OUT.tar.xz``: what a machine with a GPU lacks, to be unpacked there.

For a machine with torch for CUDA 13, CuPy, Triton and Python 3.12 on x86-64, but without a package index, and with
little room for what is sent to it. A pack holds wheels, unpacked, without what cannot be used there: FlashInfer comes
without its sources and with kernels that were built before (``python -m compose.kernels``): it need not compile.

    mkdir site && tar xf OUT.tar.xz -C site
    PYTHONPATH=site FLASHINFER_DISABLE_JIT=1 python -m bench.gpu

"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "3.12"
MOST_BYTES = 40 << 20
"""Of a pack."""


@dataclass(frozen=True, slots=True)
class Pack:
    wheels: tuple[str, ...]
    """Of the versions that are pinned, without what they need."""
    dropped: tuple[str, ...]
    """Paths that nothing reads there."""
    kept: tuple[str, ...] = ()
    """Of these, what is read."""


PACKS = {
    "flashinfer": Pack(
        wheels=(
            "flashinfer-python",
            "apache-tvm-ffi",
            "certifi",
            "charset-normalizer",
            "einops",
            "filelock",
            "idna",
            "Jinja2",
            "MarkupSafe",
            "msgspec",
            "nvidia-ml-py",
            "packaging",
            "requests",
            "tabulate",
            "tqdm",
            "typing_extensions",
            "urllib3",
            "xxhash",
        ),
        dropped=(
            "b12x",
            "build_*.py",
            "flashinfer/data",
            "flashinfer/fused_moe/backends/cudnn_frost/artifacts",
            "flashinfer/moe_ep",
            "tvm_ffi/include",
            "tvm_ffi/3rdparty",
        ),
        # It writes a module's sources before it looks whether the module was built.
        kept=("flashinfer/data/csrc/batch_prefill*",),
    ),
    "ucxx": Pack(
        wheels=(
            "ucxx-cu13",
            "libucxx-cu13",
            "libucx-cu13",
            "librmm-cu13",
            "rmm-cu13",
            "rapids-logger",
            "cuda-core",
            "msgspec",
            "nvidia-ml-py",
            "xxhash",
        ),
        dropped=("*/include", "*/*/include", "libucx/bin", "libucx/share", "*/lib64/cmake", "example.py"),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.pack", description=__doc__)
    parser.add_argument("pack", choices=PACKS)
    parser.add_argument("out", type=Path, metavar="OUT.tar.xz")
    parser.add_argument("--kernels", type=Path, help="folder that compose.kernels wrote, for FlashInfer")
    asked = parser.parse_args(arguments)
    if (asked.pack == "flashinfer") != (asked.kernels is not None):
        parser.error("--kernels goes with flashinfer, which is no use without")
    if asked.kernels is not None and not any(asked.kernels.glob("*/built.json")):
        parser.error(f"--kernels {asked.kernels}: no kernels are there; python -m compose.kernels builds them")
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        unpack(PACKS[asked.pack], Path(folder) / "wheels", site)
        drop(PACKS[asked.pack], site)
        if asked.kernels is not None:
            add_kernels(asked.kernels, site)
        write(site, asked.out)
    size = asked.out.stat().st_size
    sys.stdout.write(f"{asked.out}: {size / (1 << 20):.1f} MiB\n")
    if size > MOST_BYTES:
        sys.stderr.write(f"more than {MOST_BYTES >> 20} MiB\n")
        return 1
    return 0


def unpack(pack: Pack, wheels: Path, site: Path) -> None:
    """Raises ``subprocess.CalledProcessError`` where pip finds a wheel not."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--dest", str(wheels)]
    command += ["-c", str(ROOT / "constraints.txt"), "-c", str(ROOT / "constraints-cu13.txt")]
    subprocess.run([*command, *pack.wheels], check=True)
    for wheel in sorted(wheels.iterdir()):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def drop(pack: Pack, site: Path) -> None:
    kept = [path.relative_to(site) for pattern in pack.kept for path in site.glob(pattern)]
    aside = site.with_name("kept")
    for path in kept:
        (aside / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).rename(aside / path)
    for pattern in (*pack.dropped, "*.data", "**/*.pyc", "**/*.pyx", "**/*.pxd", "**/*.a"):
        for path in list(site.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in kept:
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (aside / path).rename(site / path)


def add_kernels(kernels: Path, site: Path) -> None:
    for about in sorted(kernels.glob("*/built.json")):
        shutil.copytree(about.parent, site / "flashinfer" / "data" / "aot" / about.parent.name)


def write(site: Path, out: Path) -> None:
    """Files of one content are one: wheels have no links, and UCX's libraries go by three names."""
    first: dict[bytes, str] = {}
    aside = out.with_name(f".{out.name}")
    with tarfile.open(aside, "w:xz", preset=1) as archive:
        for path in _files(site):
            name = str(path.relative_to(site))
            digest = hashlib.sha256(path.read_bytes()).digest()
            entry = archive.gettarinfo(path, name)
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            if entry.size and digest in first:
                entry.type, entry.linkname, entry.size = tarfile.LNKTYPE, first[digest], 0
                archive.addfile(entry)
                continue
            first[digest] = name
            with path.open("rb") as content:
                archive.addfile(entry, content)
    aside.rename(out)


def _files(site: Path) -> Iterator[Path]:
    yield from sorted(path for path in site.rglob("*") if path.is_file())


if __name__ == "__main__":
    raise SystemExit(main())
