"""What one run is to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.chaos.clocks import clock_env, clock_file
from bench.chaos.plan import KINDS, How, Kind, Scalable
from compose.config import StackConfig
from services.worker.device.late import LateOrder

MAX_RUNNING = 32
"""Seats of an instance."""
ENV: Mapping[str, str] = {
    "BLITZ_WORKER_KV_MIB": "64",
    "BLITZ_WORKER_MAX_RUNNING": str(MAX_RUNNING),
    # A decode step of the demo model's eight layers takes 8 ms, a prompt of 500 tokens 40 ms more.
    "BLITZ_MOCK_LAYER_BASE_MS": "1.0",
    "BLITZ_MOCK_LAYER_PER_TOKEN_US": "10",
    # As many instances as possible come and go.
    "BLITZ_MONITOR_DOWN_WINDOW_S": "0",
}
VLLM_ENV: Mapping[str, str] = {
    "BLITZ_WORKER_ENGINES": "vllm",
    # While all instances start, requests wait.
    "BLITZ_GATEWAY_QUEUE_TIMEOUT_S": "240",
    "BLITZ_GATEWAY_NO_ROOM_TIMEOUT_S": "120",
}
ENGINE_ARGS: Mapping[str, int | str | bool] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": MAX_RUNNING,
    "kv_cache_gib": 1,
    "enforce_eager": True,
}
"""Of vLLM. The longest question has 1,600 tokens with its answer."""
ARENA_MIB, ARENA_MODELS = 64, 2.5
"""A worker's memory for weights, and how many models of the kind that is asked for it holds at least."""
SPLIT = "-split"
"""Behind a model's name: the same checkpoint, with prefill and decode instances only."""
SWITCHED = "-switched"
"""The same once more, served the one way and the other."""
SLEEPY = "-sleepy"
"""And once more, seldom asked and given back at once."""
NUM_TUNED = 2
"""Of vLLM models of that kind, with other weights each."""
SLEEPY_KEEP_ALIVE_S = 0.5
LATE_MS = 1.0
"""Most that an operation of a late engine waits."""
_OFTEN = 5
"""Requests for each other model, for one to the sleepy one."""


EngineName = Literal["torch", "mock", "vllm"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that decides what is done. Two runs of one setting have the same plan of kills."""

    seconds: float = 60.0
    every_s: float = 3.0
    seed: int = 0
    kinds: tuple[Kind, ...] = KINDS
    how: How = "KILL"
    roles: bool = False
    fleet: bool = False
    """Roles change, workers drain, and models take turns."""
    engine: EngineName = "torch"
    python: str = ""
    """With ``vllm``: the interpreter of its environment."""
    workers: int = 4
    clients: int = 8
    nats_nodes: int = 1
    skew_s: float = 0.0
    """By how much the services' clocks are ahead and behind, one after the other."""
    late: LateOrder | None = None
    """Workers' engines compute later than they are called; which of their streams goes first."""
    questions: int = 40

    def config(self, model: Path, state_dir: Path) -> StackConfig:
        """The stack."""
        skewed = {name: clock_env(clock_file(state_dir, name)) for name in self.skewed} if self.skew_s else {}
        return StackConfig(
            models=() if self.with_vllm else (model,),  # it is registered with an engine
            state_dir=state_dir,
            workers=self.workers,
            nats_servers=self.nats_nodes,
            forks=not self.skew_s,  # a fork has its parent's clock
            port=0,
            engine="torch" if self.engine == "vllm" else self.engine,
            env={**ENV, "BLITZ_WORKER_ARENA_MIB": str(_arena_mib(model)), **self._late_env, **self._vllm_env},
            service_env=skewed,
        )

    @property
    def _late_env(self) -> dict[str, str]:
        if self.late is None:
            return {}
        return {
            "BLITZ_WORKER_LATE": self.late,
            "BLITZ_WORKER_LATE_SEED": str(self.seed),
            "BLITZ_WORKER_LATE_MS": str(LATE_MS),
        }

    @property
    def with_vllm(self) -> bool:
        """An unmodified vLLM serves."""
        return self.engine == "vllm"

    @property
    def _vllm_env(self) -> dict[str, str]:
        return {**VLLM_ENV, "BLITZ_VLLM_PYTHON": self.python} if self.with_vllm else {}

    @property
    def ready_s(self) -> float:
        """Longest until the first instance serves."""
        return 400.0 if self.with_vllm else 180.0

    @property
    def silence_s(self) -> float:
        """A request without a byte for so long has failed. Longer than any restart, shorter than the gateway's queue
        waits."""
        return 210.0 if self.with_vllm else 90.0

    @property
    def answers_s(self) -> float:
        """Within which the last requests end: the gateway's queue and the client's patience together are shorter."""
        return 500.0 if self.with_vllm else 240.0

    @property
    def skewed(self) -> tuple[str, ...]:
        """Names of the processes whose clocks are set."""
        if not self.skew_s:
            return ()
        return ("pool", "planner", "monitor", "gateway", *(f"worker-{index}" for index in range(self.workers)))

    def models(self, name: str) -> tuple[str, ...]:
        """Whom the requests are for."""
        if self.fleet:
            return (name, *self.tuned(name)) if self.with_vllm else (name, name + SWITCHED, name + SLEEPY)
        return (name, name + SPLIT) if self.roles else (name,)

    def tuned(self, name: str) -> tuple[str, ...]:
        """Those of them that have weights of their own."""
        if not (self.fleet and self.with_vllm):
            return ()
        return tuple(f"{name}-{index}{SLEEPY}" for index in range(NUM_TUNED))

    def asked(self, name: str) -> tuple[str, ...]:
        """The same, as often as each is asked."""
        return tuple(model for model in self.models(name) for _ in range(1 if model.endswith(SLEEPY) else _OFTEN))

    def scalables(self, name: str) -> tuple[Scalable, ...]:
        """What is scaled up and down. With roles one worker more than these need at least is left to move."""
        if self.fleet:
            return (Scalable(name, "colocated", 1, max(1, self.workers // 2)),)
        if not self.roles:
            return (Scalable(name, "colocated", 1, self.workers),)
        high = max(1, self.workers - 3)
        split = name + SPLIT
        return (
            Scalable(name, "colocated", 1, high),
            Scalable(split, "prefill", 1, high),
            Scalable(split, "decode", 1, high),
        )


def _arena_mib(model: Path) -> int:
    num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return max(ARENA_MIB, int(ARENA_MODELS * num_bytes) >> 20)
