"""What a process computes before it offers itself: kernels are chosen, compiled and paged in with their first use.

A worker registers when that is done, so that no request waits for it. It cannot know which model will come: a tiny one
runs, in each of the usual dtypes, with everything that a step may need. It takes 70 ms of one core, and 13 ms when it
is done again (measured): the difference is what the first request would have waited for.
"""

from __future__ import annotations

import logging
import threading
import time

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.device import Device
from services.worker.device.host import HOST
from services.worker.engine.kv_pool import KvPool, kv_pool_bytes
from services.worker.engine.loop import EngineLoop
from services.worker.engine.torch_engine import TorchEngine
from services.worker.memory.arena import Arena
from shared.layout import CHECK_BYTES, layout_of
from shared.messages.generation import SamplingParams
from shared.model_spec import Dtype, ModelSpec

_log = logging.getLogger(__name__)

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
BLOCK_SIZE = 16
NUM_BLOCKS = 64
HOST_HEAD_DIMS = (32,)
CHECKED_BLOCKS = (1, 3, 16)
"""For these numbers the checksums' kernels are compiled apart: one, many, and a multiple of 16."""
GPU_HEAD_DIMS = (64, 128)
"""Each has kernels of its own, which are loaded here."""
NUM_TOKENS = 3
VOCAB_SIZE = 512
PROMPTS = (40, 24, 5)
_PARAMS = (
    SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, logprobs=1),
    SamplingParams(max_tokens=NUM_TOKENS, seed=0, frequency_penalty=0.1),
    SamplingParams(max_tokens=NUM_TOKENS, seed=0, top_p=0.9),
)


def warm_up(device: Device = HOST) -> int:
    """Run it; returns the number of tokens that were computed."""
    if device.graphs is None:
        return sum(_run(dtype, head_dim, device) for dtype in DTYPES for head_dim in HOST_HEAD_DIMS)
    computed = sum(_run(dtype, head_dim, device) for dtype in DTYPES for head_dim in GPU_HEAD_DIMS)
    memory = device.allocate(max(CHECKED_BLOCKS) * CHECK_BYTES)
    for num_blocks in CHECKED_BLOCKS:
        memory.checksums(0, num_blocks * CHECK_BYTES)
    device.graphs.forget()
    return computed


def _run(dtype: Dtype, head_dim: int, device: Device) -> int:
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        dtype=dtype,
        vocab_size=VOCAB_SIZE,
        hidden_size=4 * head_dim,
        intermediate_size=8 * head_dim,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        max_position=256,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
    )
    layout = layout_of(spec)
    arena = Arena(device.allocate(layout.num_bytes))  # zeros: so are the logits, and no number on the way is odd
    pool = KvPool(device.allocate(kv_pool_bytes(layout, BLOCK_SIZE, NUM_BLOCKS)))
    engine = TorchEngine(layout, arena, pool, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, device=device)
    # Prompts in chunks: with and without a prefix; then decodes, alone and together.
    config = SchedulerConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, prefill_chunk_tokens=24)
    loop = EngineLoop(engine, config, time.monotonic)
    for index, (length, params) in enumerate(zip(PROMPTS, _PARAMS, strict=True)):
        prompt = tuple(range(length))
        loop.add(ActiveSequence(request_id=str(index), attempt=1, gateway_id="warm-up", prompt=prompt, params=params))
    landing = threading.Event()
    loop.wake = landing.set
    computed = 0
    while loop.has_work:
        step = loop.step()
        if step is None:
            if not loop.num_in_flight:
                break
            landing.wait()
            landing.clear()
            continue
        if step.error is not None:
            _log.warning("models in %s will not run here: %s", dtype, step.error.message)
        computed += step.num_prefill_tokens + step.num_decode_tokens
    return computed
