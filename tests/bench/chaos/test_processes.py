from __future__ import annotations

from bench.chaos.processes import Listed, vllm_processes

FRONT = ("python", "-m", "blitz_vllm", "/tmp/front.sock", "10")
TRACKER = ("python", "-c", "from multiprocessing.resource_tracker import main;main(7)")
WAITS = [Listed(20, 10, FRONT)]
SERVES = [
    Listed(30, 10, FRONT),
    Listed(31, 30, TRACKER),
    Listed(32, 30, ("VLLM::EngineCore",)),
    Listed(33, 32, TRACKER),
    Listed(34, 32, ("VLLM::Worker",)),
]


def test_processes_of_vllm_are_told_apart() -> None:
    serving = {"vllm_front": 30, "vllm_core": 32, "vllm_worker": 34}
    assert vllm_processes(10, SERVES) == serving
    assert vllm_processes(10, WAITS) == {"vllm_idle": 20}
    assert (
        vllm_processes(10, [*WAITS, *SERVES]) == vllm_processes(10, [*SERVES, *WAITS]) == {"vllm_idle": 20, **serving}
    )


def test_one_that_is_just_forked_and_those_of_another_worker_are_none() -> None:
    assert vllm_processes(10, [Listed(30, 10, FRONT), Listed(32, 30, FRONT)]) == {"vllm_idle": 30}
    assert vllm_processes(11, [*WAITS, *SERVES]) == {}
    assert vllm_processes(10, []) == {}
