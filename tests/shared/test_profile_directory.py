"""Profiles in a directory, as services read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.profile import Profile, write_profile
from shared.profile_directory import ProfileDirectory
from tests.records import model, profile

MODEL = model()


def find(directory: ProfileDirectory, engine: str = "torch") -> Profile | None:
    return directory.find(model_hash=MODEL.model_hash, layout_hash=MODEL.layout_hash, engine=engine, device="cpu")


def looked(path: Path | None) -> ProfileDirectory:
    directory = ProfileDirectory(path)
    directory.look()
    return directory


def test_the_newest_profile_of_the_model_is_found(tmp_path: Path) -> None:
    write_profile(tmp_path / "a.json", profile(MODEL, measured_at_s=2.0))
    write_profile(tmp_path / "b.json", profile(MODEL, measured_at_s=1.0))
    write_profile(tmp_path / "other.json", profile(model("other"), measured_at_s=3.0))
    found = find(looked(tmp_path))
    assert found is not None
    assert found.measured_at_s == 2.0


def test_a_single_file_will_do_and_so_will_nothing(tmp_path: Path) -> None:
    write_profile(tmp_path / "a.json", profile(MODEL))
    assert find(looked(tmp_path / "a.json")) is not None
    assert find(looked(None)) is None


def test_a_profile_that_comes_later_or_changes_is_seen_at_the_next_look(tmp_path: Path) -> None:
    directory = looked(tmp_path)
    assert find(directory) is None
    write_profile(tmp_path / "a.json", profile(MODEL))
    directory.look()
    first = find(directory)
    write_profile(tmp_path / "a.json", profile(MODEL, mutation_s=7.0))
    os.utime(tmp_path / "a.json", ns=(1, 1))
    directory.look()
    assert first is not None
    assert find(directory) == profile(MODEL, mutation_s=7.0)
    (tmp_path / "a.json").unlink()
    directory.look()
    assert find(directory) is None


def test_what_is_of_no_use_is_warned_of_once_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "broken.json").write_bytes(b"{")
    (tmp_path / "notes.txt").write_bytes(b"not ours")
    write_profile(tmp_path / "old.json", profile(MODEL, version="0.0.1"))
    write_profile(tmp_path / "mock.json", profile(MODEL, engine="mock", measured_at_s=9.0))
    os.mkfifo(tmp_path / "pipe.json")
    directory = ProfileDirectory(tmp_path)
    for _ in range(3):
        directory.look()
        assert find(directory) is None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert all(any(name in text for text in said) for name in ("broken.json", "old.json", "mock.json"))
    found = find(directory, engine="mock")
    assert found is not None
    assert found.engine == "mock"


def test_of_several_gpus_the_profile_of_the_workers_own_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    h100, a100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
    for name, gpu_name, at_s in (("h.json", h100, 1.0), ("a.json", a100, 2.0), ("n.json", "", 3.0)):
        write_profile(tmp_path / name, profile(MODEL, device="cuda", gpu_name=gpu_name, measured_at_s=at_s))
    directory = looked(tmp_path)

    def of(gpu_name: str) -> Profile | None:
        return directory.find(
            model_hash=MODEL.model_hash,
            layout_hash=MODEL.layout_hash,
            engine="torch",
            device="cuda",
            gpu_name=gpu_name,
        )

    for _ in range(2):
        for gpu_name in (h100, a100):
            found = of(gpu_name)
            assert found is not None
            assert found.gpu_name == gpu_name
    said = [record.getMessage() for record in caplog.records if "n.json" in record.getMessage()]
    assert len(said) == 2, "once for each kind of worker that could have used it"
    assert all("is not used" in text and "a GPU that it does not name" in text for text in said)
    assert of("") is None


def test_a_path_that_is_not_there_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = looked(tmp_path / "none")
    directory.look()
    assert find(directory) is None
    assert len(caplog.records) == 1
