"""Called by vLLM in each of its processes (``vllm.general_plugins``), if ``VLLM_PLUGINS`` names it."""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import signal
from collections.abc import Callable
from typing import Any

OURS = "BLITZ_VLLM_PARENT"
"""Set by our process for those that it starts: in somebody else's ``vllm serve`` this plugin does nothing."""
SPIN_S = 0.05
"""While requests are served, steps follow each other sooner. Much less would lose words: zmq takes 1.5 ms to see that
the last one was heard."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Be killed as soon as the process that started this one, of this id, has ended, whatever this one is doing."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def forks_die_with_parents() -> None:
    """Those that this process forks, and theirs."""
    forking = [0]
    os.register_at_fork(
        before=lambda: forking.__setitem__(0, os.getpid()), after_in_child=lambda: die_with_parent(forking[0])
    )


def compile_nothing() -> None:
    """In this process and its forks. Without this, vLLM compiles single functions however it is started: with the first
    request for log-probabilities one that ranks tokens, for ten seconds on a CPU, while all others wait."""
    import torch

    torch.compiler.set_stance("force_eager")


def share_cores() -> None:
    """In this process and its forks: who waits for another of vLLM's processes soon sleeps. vLLM's spin for a second
    after each answer, on a CPU with the cores that compute, or that bring another engine's weights."""
    from vllm.distributed.device_communicators import shm_broadcast

    waiting = getattr(shm_broadcast, "SpinCondition", None)
    if waiting is None or "busy_loop_s" not in inspect.signature(waiting.__init__).parameters:
        return  # another version waits in another way
    begin = waiting.__init__

    @functools.wraps(begin)
    def begin_with_little_spinning(*args: Any, **named: Any) -> None:
        begin(*args, **{"busy_loop_s": SPIN_S, **named})

    waiting.__init__ = begin_with_little_spinning


def draw_for_whole_prompts() -> None:
    """In this process and its forks, on CPUs: a request with a seed draws nothing while no more than a piece of its
    prompt was computed. vLLM draws all the same and winds the generator back, which those of CPUs cannot: it would
    end."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample: Callable[[Any, Any], Any] = CPUModelRunner.sample_tokens

    @functools.wraps(sample)
    def sample_tokens(runner: Any, grammar_output: Any) -> Any:
        batch, generators = runner.input_batch, runner.input_batch.generators
        pieces = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        held = {row: generators.pop(row) for row in pieces if row in generators}
        try:
            return sample(runner, grammar_output)
        finally:
            generators.update(held)

    CPUModelRunner.sample_tokens = sample_tokens


def register() -> None:
    """Our ways for weights and grammars; and no process of ours outlives the one that started it."""
    parent = os.environ.get(OURS)
    if parent is None:
        return
    if parent != str(os.getpid()):
        die_with_parent(os.getppid())
    from . import grammars, weights

    weights.register()
    weights.register_refill()
    grammars.install()
