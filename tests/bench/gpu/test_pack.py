"""What is packed for a machine with a GPU: by small folders. Wheels are not loaded here."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from bench.gpu.pack import PACKS, Pack, add_kernels, drop, main, write

ROOT = Path(__file__).resolve().parents[3]


def put(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(file)
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_nothing_reads_is_dropped_but_for_what_is_kept(tmp_path: Path) -> None:
    site = put(tmp_path / "site", "a/code.py", "a/data/source.cu", "a/data/needed.cu", "a/data/sub/x", "b/lib.a")
    drop(Pack(wheels=(), dropped=("a/data",), kept=("a/data/needed*",)), site)
    assert files(site) == {"a/code.py", "a/data/needed.cu"}


def test_kernels_go_where_flashinfer_looks_and_their_sources_stay_behind(tmp_path: Path) -> None:
    kernels = put(tmp_path / "kernels", "page/page.so", "page/built.json", ".work/cuda/x", "half/half.so")
    add_kernels(kernels, site := tmp_path / "site")
    assert files(site) == {"flashinfer/data/aot/page/page.so", "flashinfer/data/aot/page/built.json"}


def test_files_of_one_content_are_packed_once_and_come_out_whole(tmp_path: Path) -> None:
    site = put(tmp_path / "site", "lib/libx.so.1.0", "empty", "other")
    (site / "lib" / "libx.so").write_text("lib/libx.so.1.0")
    (site / "empty").write_text("")
    write(site, tmp_path / "pack.tar.xz")
    with tarfile.open(tmp_path / "pack.tar.xz") as archive:
        assert sum(entry.islnk() for entry in archive) == 1
        archive.extractall(tmp_path / "out", filter="data")
    assert {name: (tmp_path / "out" / name).read_text() for name in files(tmp_path / "out")} == {
        "lib/libx.so": "lib/libx.so.1.0",
        "lib/libx.so.1.0": "lib/libx.so.1.0",
        "empty": "",
        "other": "other",
    }


@pytest.mark.parametrize("name", sorted(PACKS))
def test_each_wheel_is_of_a_pinned_version(name: str) -> None:
    lines = (ROOT / "constraints.txt").read_text() + (ROOT / "constraints-cu13.txt").read_text()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines.split()}
    assert {wheel.lower().replace("_", "-") for wheel in PACKS[name].wheels} <= pinned


def test_flashinfer_without_kernels_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["flashinfer", str(tmp_path / "pack.tar.xz")])
    assert "--kernels goes with flashinfer" in capsys.readouterr().err


def test_a_folder_without_kernels_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SystemExit):
            main(["flashinfer", "--kernels", str(folder), str(tmp_path / "pack.tar.xz")])
        assert f"--kernels {folder}: no kernels are there" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []
