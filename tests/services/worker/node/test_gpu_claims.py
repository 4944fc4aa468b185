"""Workers of one GPU do not take more of its memory than it has, also where they start at the same moment."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.worker.config import WorkerConfig
from services.worker.node.gpu_checks import CONTEXT_BYTES, MADE_BYTES
from services.worker.node.gpu_claims import Claimed, GpuClaim, check_room, claim_of
from services.worker.node.gpu_facts import GpuFacts
from shared.errors import Unavailable
from shared.settings import SettingsError
from tests.services.workers import worker_config

MIB = 1 << 20
TOTAL_BYTES = 80_000 * MIB


class Memory:
    """Of a GPU, that workers allocate."""

    def __init__(self, total_bytes: int = TOTAL_BYTES) -> None:
        self.total_bytes = self.free_bytes = total_bytes

    def read(self) -> GpuFacts:
        return GpuFacts(
            name="NVIDIA H100 80GB HBM3",
            uuid="GPU-11aa",
            capability=(9, 0),
            total_bytes=self.total_bytes,
            free_bytes=self.free_bytes,
        )


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def claims() -> Iterator[list[GpuClaim]]:
    """To be released when the test ends."""
    made: list[GpuClaim] = []
    yield made
    for claim in made:
        claim.release()


def _config(folder: Path, worker_id: str, share: float) -> WorkerConfig:
    """Of a worker that needs such a share of the memory."""
    arena_bytes = int(share * TOTAL_BYTES) - CONTEXT_BYTES - 1000 * MIB
    return worker_config(
        worker_id, device="cuda", gpu_claims=folder / "claims", arena_bytes=arena_bytes, kv_bytes=1000 * MIB
    )


def _start(config: WorkerConfig, memory: Memory, claims: list[GpuClaim], *, takes: float = 1.0) -> None:
    claim = claim_of(config, memory.read, wait_s=5.0)
    claims.append(claim)
    memory.free_bytes -= int(takes * (config.arena_bytes + config.kv_bytes))
    claim.allocated()


def test_shares_that_fit_together_are_given(tmp_path: Path, memory: Memory, claims: list[GpuClaim]) -> None:
    for index in range(4):
        _start(_config(tmp_path, f"w{index}", 0.25), memory, claims)
    with pytest.raises(SettingsError) as caught:
        _start(_config(tmp_path, "w4", 0.25), memory, claims)
    assert caught.value.message == (
        "BLITZ_WORKER_ARENA_MIB=16440 and BLITZ_WORKER_KV_MIB=1000 with 2560 MiB for CUDA need 20000 MiB, and NVIDIA "
        "H100 80GB HBM3 (GPU-11aa) has 10240 MiB free of 80000, 0 of them beside what other workers claim (w0 20000, "
        "w1 20000, w2 20000, w3 20000 MiB): lower them, or name another GPU with CUDA_VISIBLE_DEVICES"
    )


def test_what_others_will_take_later_is_theirs(tmp_path: Path, memory: Memory, claims: list[GpuClaim]) -> None:
    _start(_config(tmp_path, "w0", 0.6), memory, claims, takes=0.1)
    assert memory.free_bytes > 0.9 * TOTAL_BYTES
    with pytest.raises(SettingsError, match="32000 of them beside what other workers claim"):
        _start(_config(tmp_path, "w1", 0.6), memory, claims)
    _start(_config(tmp_path, "w1", 0.4), memory, claims)


def test_the_context_is_there_before_what_is_free_is_asked(
    tmp_path: Path, memory: Memory, claims: list[GpuClaim]
) -> None:
    memory.free_bytes = int(0.5 * TOTAL_BYTES) - MADE_BYTES
    _start(_config(tmp_path, "w0", 0.5), memory, claims)


def test_what_is_not_a_workers_is_not_free_either(tmp_path: Path, memory: Memory, claims: list[GpuClaim]) -> None:
    memory.free_bytes = 30_000 * MIB
    with pytest.raises(SettingsError, match="has 30000 MiB free of 80000: lower them"):
        _start(_config(tmp_path, "w0", 0.5), memory, claims)


def test_the_next_one_looks_when_the_one_before_has_allocated(
    tmp_path: Path, memory: Memory, claims: list[GpuClaim]
) -> None:
    first = claim_of(_config(tmp_path, "w0", 0.4), memory.read)
    claims.append(first)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(claim_of, _config(tmp_path, "w1", 0.4), memory.read, wait_s=30.0)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.3)
        memory.free_bytes -= int(0.4 * TOTAL_BYTES)
        first.allocated()
        claims.append(second.result(timeout=10))
    with pytest.raises(Unavailable, match=r"another worker of this GPU has not allocated its memory in 0.1 s, .*/lock"):
        claim_of(_config(tmp_path, "w2", 0.1), memory.read, wait_s=0.1)


def test_of_workers_that_start_at_once_those_start_that_fit(
    tmp_path: Path, memory: Memory, claims: list[GpuClaim]
) -> None:
    together = threading.Barrier(6)

    def start(index: int) -> bool:
        together.wait()
        try:
            _start(_config(tmp_path, f"w{index}", 0.3), memory, claims)
        except SettingsError:
            return False
        return True

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(start, range(6))) == 3
    assert memory.free_bytes > 0


def test_a_claim_ends_with_its_process(tmp_path: Path, memory: Memory, claims: list[GpuClaim]) -> None:
    config = _config(tmp_path, "w0", 0.9)
    program = """
import sys
from pathlib import Path
from tests.services.worker.node.test_gpu_claims import Memory, _config
from services.worker.node.gpu_claims import claim_of
claim = claim_of(_config(Path(sys.argv[1]), "w0", 0.9), Memory().read)
claim.allocated()
print("claimed", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"claimed\n"
        with pytest.raises(SettingsError, match=r"\(w0 72000 MiB\)"):
            claim_of(config, memory.read)
        other.kill()
        other.wait()
    _start(config, memory, claims)
    files = [file.name for file in (tmp_path / "claims/GPU-11aa").glob("*.claim")]
    assert len(files) == 1, "the dead process's is left"


def test_a_claim_that_is_released_is_none(tmp_path: Path, memory: Memory) -> None:
    claim = claim_of(_config(tmp_path, "w0", 0.9), memory.read)
    claim.release()
    claim.release()
    assert [*(tmp_path / "claims/GPU-11aa").glob("*.claim")] == []
    claim_of(_config(tmp_path, "w1", 0.9), memory.read).release()


def test_other_gpus_are_others(tmp_path: Path, memory: Memory, claims: list[GpuClaim]) -> None:
    _start(_config(tmp_path, "w0", 0.9), memory, claims)
    other = dataclasses.replace(Memory().read(), uuid="GPU-22bb")
    claims.append(claim_of(_config(tmp_path, "w1", 0.9), lambda: other))


def test_where_nothing_can_be_noted_it_is_said(tmp_path: Path, memory: Memory) -> None:
    (tmp_path / "claims").write_text("no directory")
    with pytest.raises(Unavailable, match=r"BLITZ_WORKER_GPU_CLAIMS=.*: claims on the GPU's memory cannot be noted"):
        claim_of(_config(tmp_path, "w0", 0.5), memory.read)


@pytest.mark.parametrize("name", ["lock", "w1.7.claim"])
def test_what_is_no_file_is_named(tmp_path: Path, memory: Memory, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    at = tmp_path / "claims/GPU-11aa" / name
    at.parent.mkdir(parents=True)
    at.symlink_to(precious)
    with pytest.raises(Unavailable, match=rf"cannot be noted there: {at}: Too many levels of symbolic links"):
        claim_of(_config(tmp_path, "w0", 0.5), memory.read)
    assert precious.read_text() == "kept"


def test_a_claim_of_the_same_name_stays_its_owners(tmp_path: Path, memory: Memory, claims: list[GpuClaim]) -> None:
    _start(_config(tmp_path, "w0", 0.3), memory, claims)
    [file] = (tmp_path / "claims/GPU-11aa").glob("*.claim")
    noted = file.read_text()
    with pytest.raises(Unavailable, match=rf"a worker w0 with this process id lives already, and holds {file}"):
        claim_of(_config(tmp_path, "w0", 0.3), memory.read)
    assert file.read_text() == noted != ""


def test_a_hostile_name_is_shown_in_the_one_line(tmp_path: Path, memory: Memory, claims: list[GpuClaim]) -> None:
    _start(_config(tmp_path, "w0", 0.6), memory, claims)
    folder = tmp_path / "claims/GPU-11aa"
    [file] = folder.glob("*.claim")
    file.rename(folder / "a\nb\x1b[31m.7.claim")
    with pytest.raises(SettingsError) as caught:
        claim_of(_config(tmp_path, "w1", 0.6), memory.read)
    assert r"other workers claim (a\nb\x1b[31m 48000 MiB)" in caught.value.message


def test_another_users_directory_is_not_believed(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "claims").mkdir()
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(SettingsError, match="belongs to another user"):
        claim_of(_config(tmp_path, "w0", 0.5), memory.read)


def test_a_gpu_that_does_not_answer_is_not_claimed(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        claim_of(_config(tmp_path, "w0", 0.5), lambda: None)


def test_memory_that_is_not_known_is_not_checked(tmp_path: Path) -> None:
    check_room(_config(tmp_path, "w0", 0.5), Memory(total_bytes=0).read(), (Claimed("w1", 1 << 40),))
