"""Profiles of GPUs that are not here, derived from the kernel measurements that AIConfigurator ships.

    python -m venv /tmp/aic && /tmp/aic/bin/pip install aiconfigurator-core==0.12.0 msgspec typer
    PYTHONPATH=. /tmp/aic/bin/python -m bench.sim.make_profiles

The tool estimates each operator of a step by interpolating kernel times that NVIDIA measured on the GPU (matrix
products, attention, all-reduce), and elementwise ones by bytes over bandwidth. Nothing is downloaded but the package;
docs/profiles.md says what the figures are worth.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from bench.sim.architectures import CONFIGS, weights_bytes
from shared.models.families import parse_config
from shared.profile import (
    DecodeFit,
    DecodePoint,
    Derived,
    PrefillFit,
    PrefillPoint,
    Profile,
    write_profile,
)
from shared.step_fit import DensePoint, StepFit

Fit = TypeVar("Fit", StepFit, DecodeFit, PrefillFit)
PROFILES = Path(__file__).parent / "profiles"
TOOL = "aiconfigurator-core"
BACKEND = "vllm"
MEMORY_BYTES = 80 * 2**30
"""Of an A100 or H100."""
KV_SHARE = 0.9
"""Of what is left beside the weights, that KV may take."""
LONGEST = 16384
PROMPTS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, LONGEST)
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, LONGEST)
DENSE = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 129, 160, 192, 224, 256, 257, 320, 384, 448, 512, 513, 640, 768, 896,
    1024, 1025, 1280, 1536, 2048, 2049, 3072, 4096, 4097, 6144, 8192, 8193, 12288, LONGEST,
)  # fmt: skip
"""Matrix products step up where a tile more is needed: behind powers of two there is a second point."""


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    gpu: str
    system: str
    """AIConfigurator's name for the GPU and its host."""
    tensor_parallel: int

    @property
    def name(self) -> str:
        return f"{self.model}-tp{self.tensor_parallel}-{self.gpu}"


CASES = tuple(
    Case(model, gpu, system, tensor_parallel)
    for model, tensor_parallel in (("llama-3-8b", 1), ("mistral-24b", 1), ("mistral-24b", 2), ("qwen2.5-72b", 4))
    for gpu, system in (("a100", "a100_sxm"), ("h100", "h100_sxm"))
)


class Estimates:
    """What AIConfigurator says of one case, in seconds."""

    def __init__(self, case: Case) -> None:
        try:
            from aiconfigurator_core.sdk.engine import EngineHandle
        except ImportError:
            sys.exit(f"{TOOL} is missing; it is no dependency of this project: see bench/sim/make_profiles.py")
        with tempfile.TemporaryDirectory() as folder:
            # Mistral's layers are Llama's; the tool knows only the latter by name.
            known = "Qwen2ForCausalLM" if case.model.startswith("qwen") else "LlamaForCausalLM"
            config = dict(CONFIGS[case.model]) | {"architectures": [known], "hidden_act": "silu"}
            Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            self._engine: Any = EngineHandle.compile(
                folder,
                case.system,
                BACKEND,
                backend_version="current",
                tp_size=case.tensor_parallel,
                gemm_quant_mode="bfloat16",
                kvcache_quant_mode="bfloat16",
                fmha_quant_mode="bfloat16",
            )

    def prompt_s(self, num_tokens: int) -> float:
        return float(self._engine.predict_prefill_latency(1, num_tokens)) / 1e3

    def decode_s(self, num_requests: int, context_tokens: int) -> float:
        return float(self._engine.decode_step_latency(num_requests, context_tokens, 2)) / 1e3

    def operators_s(self, num_tokens: int) -> dict[str, float]:
        """Of a prompt that is computed at once."""
        operators, _ = self._engine.run_static_per_op(batch_size=1, isl=num_tokens, osl=2)
        return {name: float(milliseconds) / 1e3 for name, milliseconds, *_ in operators}

    def decode_attention_s(self, num_requests: int, context_tokens: int) -> float:
        operators = self._engine.decode_step_per_op(num_requests, context_tokens, 2)
        return sum(float(milliseconds) for name, milliseconds, *_ in operators if "attention" in name) / 1e3


def derive(case: Case) -> Profile:
    spec = parse_config(CONFIGS[case.model])
    estimates = Estimates(case)
    weights, kv_token = weights_bytes(spec), spec.kv_bytes_per_token
    kv_tokens = int((MEMORY_BYTES * case.tensor_parallel * KV_SHARE - weights) / kv_token)
    prefill = _never_falling({n: estimates.prompt_s(n) for n in PROMPTS})
    decode = {(b, c): estimates.decode_s(b, c) for b in BATCHES for c in CONTEXTS if b * c <= kv_tokens}
    return Profile(
        version=f"{TOOL} {_tool_version()}",
        measured_at_s=float(int(time.time())),
        model=case.model,
        model_hash=f"derived:{case.name}",
        layout_hash=f"derived:{case.name}",
        engine="mock",
        device="cuda",
        num_threads=1,
        num_layers=spec.num_layers,
        weights_bytes=weights,
        kv_bytes_per_token=kv_token,
        chunk_tokens=LONGEST,
        prefill=tuple(PrefillPoint(prompt_tokens=n, seconds=s, repetitions=1) for n, s in prefill.items()),
        decode=tuple(
            DecodePoint(num_requests=b, context_tokens=c, seconds=s, repetitions=1) for (b, c), s in decode.items()
        ),
        decode_fit=_decode_fit(decode),
        prefill_fit=_prefill_fit(prefill),
        step_fit=_step_fit(estimates, prefill, decode),
        derived=Derived(
            source=f"AIConfigurator, kernels as measured by NVIDIA with {BACKEND}, system {case.system}",
            licence="Apache-2.0",
            tool=f"{TOOL} {_tool_version()}",
            method="bench/sim/make_profiles.py: operators of a step added up, bf16, no overhead of an engine",
            gpu=f"{case.gpu.upper()} SXM 80 GB",
            tensor_parallel=case.tensor_parallel,
        ),
    )


def _step_fit(estimates: Estimates, prefill: dict[int, float], decode: dict[tuple[int, int], float]) -> StepFit:
    without_attention = {
        n: sum(s for name, s in estimates.operators_s(n).items() if "attention" not in name) for n in DENSE
    }
    dense = tuple(DensePoint(num_tokens=n, seconds=s) for n, s in _never_falling(without_attention).items())
    bare = StepFit(
        dense=dense, prompts_s=0, prompt_token_s=0, pair_s=0, decodes_s=0, request_s=0, context_token_s=0, error=0
    )
    prompts_s, prompt_token_s, pair_s = _costs(
        [(1, n, n * (n + 1) // 2) for n in prefill],
        [s - bare.step_s(n, 0, 0, 0) for n, s in prefill.items()],
        list(prefill.values()),
    )
    decodes_s, request_s, context_token_s = _costs(
        [(1, b, b * c) for b, c in decode],
        [estimates.decode_attention_s(b, c) for b, c in decode],
        list(decode.values()),
    )
    fit = StepFit(
        dense=dense,
        prompts_s=prompts_s,
        prompt_token_s=prompt_token_s,
        pair_s=pair_s,
        decodes_s=decodes_s,
        request_s=request_s,
        context_token_s=context_token_s,
        error=0.0,
    )
    pairs = [(fit.step_s(n, n * (n + 1) // 2, 0, 0), s) for n, s in prefill.items()]
    pairs += [(fit.step_s(0, 0, b, b * c), s) for (b, c), s in decode.items()]
    return _with_error(fit, pairs)


def _decode_fit(decode: dict[tuple[int, int], float]) -> DecodeFit:
    seconds = list(decode.values())
    base_s, request_s, context_token_s = _costs([(1, b, b * c) for b, c in decode], seconds, seconds)
    fit = DecodeFit(base_s=base_s, request_s=request_s, context_token_s=context_token_s, error=0.0)
    return _with_error(fit, [(fit.step_s(b, b * c), s) for (b, c), s in decode.items()])


def _prefill_fit(prefill: dict[int, float]) -> PrefillFit:
    seconds = list(prefill.values())
    base_s, token_s, pair_s = _costs([(1, n, n * (n + 1) // 2) for n in prefill], seconds, seconds)
    fit = PrefillFit(base_s=base_s, token_s=token_s, pair_s=pair_s, error=0.0)
    pairs = [(base_s + n * token_s + n * (n + 1) // 2 * pair_s, s) for n, s in prefill.items()]
    return _with_error(fit, pairs)


def _never_falling(seconds: dict[int, float]) -> dict[int, float]:
    """The nearest times that never fall with size: a kernel is chosen by size, and a larger one may be a few percent
    faster than its smaller neighbour."""
    from scipy.optimize import isotonic_regression

    rising = isotonic_regression(list(seconds.values()), weights=[1 / s**2 for s in seconds.values()]).x
    return dict(zip(seconds, map(float, rising), strict=True))


def _costs(amounts: Sequence[Sequence[int]], seconds: Sequence[float], steps_s: Sequence[float]) -> list[float]:
    """Seconds of one of each thing, none negative, so that the differences as shares of ``steps_s`` are least."""
    import numpy as np
    from scipy.optimize import nnls

    shares = np.array(amounts, dtype=float) / np.array(steps_s)[:, None]
    scale = shares.max(axis=0)
    found, _ = nnls(shares / scale, np.array(seconds) / np.array(steps_s))
    return [float(cost) for cost in found / scale]


def _with_error(fit: Fit, pairs: Sequence[tuple[float, float]]) -> Fit:
    error = max(abs(expected - measured_s) / measured_s for expected, measured_s in pairs)
    return msgspec.structs.replace(fit, error=error)


def _tool_version() -> str:
    return version(TOOL)


def main(
    out: Annotated[Path, typer.Option(help="Directory that the profiles are written into.")] = PROFILES,
) -> None:
    """Write a profile for each model, GPU and tensor parallelism."""
    out.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        profile = derive(case)
        write_profile(out / f"{case.name}.json", profile)
        steps_error = profile.step_fit.error if profile.step_fit is not None else 0.0
        typer.echo(
            f"{case.name}: the fits err by up to {profile.prefill_fit.error:.1%} (prompts), "
            f"{profile.decode_fit.error:.1%} (decodes), {steps_error:.1%} (steps)"
        )


if __name__ == "__main__":
    typer.run(main)
