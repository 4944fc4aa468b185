"""The burst on paper: prompts, times, and the settings of workers under which one prompt is one batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bench.lab.plan import Rate
from bench.replay.plan import prompt_of
from shared.errors import BadRequest

EngineKind = Literal["mock", "torch"]
_SEED = 7
_TOKEN_IDS = range(10, 250)
_KV_MIB = 128
_MIN_RATE_BITS = 1_000_000


@dataclass(frozen=True, slots=True)
class Workload:
    """``num_prompts`` equal prompts at once, for a model of ``num_layers`` decoder layers."""

    engine: EngineKind
    num_prompts: int = 12
    num_layers: int = 32
    prompt_tokens: int = 128
    output_tokens: int = 4
    """Of each request. Few: the playback knows nothing of decoding."""
    layer_s: float = 0.01
    """One layer of one prompt. The mock is told to take it; of another engine it is measured."""
    ratio: float = 6.0
    """Layer-times in which one layer is loaded."""

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 2), ("num_layers", 2), ("prompt_tokens", 16), ("output_tokens", 1)):
            value = getattr(self, name)
            if value < least:
                raise BadRequest(f"{name} must be at least {least}, not {value}", param=name)
        for name in ("layer_s", "ratio"):
            value = getattr(self, name)
            if not 0 < value < 1000:
                raise BadRequest(f"{name} must be positive, not {value!r}", param=name)

    def with_layer_s(self, layer_s: float) -> Workload:
        """The same with another layer time. Raises ``BadRequest``."""
        return replace(self, layer_s=layer_s)

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids, equally many and all different."""
        return tuple(
            prompt_of(_SEED, index, self.prompt_tokens, token_ids=_TOKEN_IDS) for index in range(self.num_prompts)
        )

    @property
    def alone_s(self) -> float:
        """Seconds that one instance needs for all prompts."""
        return self.num_prompts * self.num_layers * self.layer_s

    def rate(self, layer_bytes: int) -> Rate:
        """The link at which a layer of ``layer_bytes`` takes ``ratio`` layer-times. Raises ``BadRequest``."""
        bits_per_s = round(layer_bytes * 8 / (self.ratio * self.layer_s))
        if bits_per_s < _MIN_RATE_BITS:
            raise BadRequest(f"{bits_per_s} bit/s is no rate of a link: lower the ratio or the layer time")
        return Rate.parse(f"{bits_per_s}bit")

    def worker_env(self) -> dict[str, str]:
        """Settings of every worker.

        One prompt is one batch, as in the playback, and the whole burst fits an instance's queue. A batch has room for
        the decodes of the prompts just before it, or they would push its last tokens into the next step. The mock's
        time is per token: a time per layer would make each decode step as long as a prefill.
        """
        env = {
            "BLITZ_WORKER_MAX_BATCH_TOKENS": str(self.prompt_tokens + self.output_tokens - 1),
            "BLITZ_WORKER_PREFILL_CHUNK": str(self.prompt_tokens),
            "BLITZ_WORKER_SLO_TBT_MS": "0",
            "BLITZ_WORKER_MAX_QUEUED_TOKENS": str(2 * self.num_prompts * (self.prompt_tokens + self.output_tokens)),
            "BLITZ_WORKER_MAX_RUNNING": str(2 * self.num_prompts),
            "BLITZ_WORKER_KV_MIB": str(_KV_MIB),
            "BLITZ_WORKER_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        if self.engine == "mock":
            env["BLITZ_MOCK_LAYER_PER_TOKEN_US"] = f"{self.layer_s / self.prompt_tokens * 1e6:.4f}"
        return env
