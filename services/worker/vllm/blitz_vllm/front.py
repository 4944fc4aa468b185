"""Between a worker's socket and vLLM's ``AsyncLLM``: requests in, tokens out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from . import grammars, plugin, scores, weights, words

log = logging.getLogger(__name__)

LOAD_EVERY_S = 0.1
"""How often the load is said."""
MAX_STEPS = 200
"""That are told at once."""
MAX_UNREAD_BYTES = 256 << 20
"""Of a worker that does not read: this process ends."""
NAMES = (
    ("vllm", "AsyncEngineArgs"),
    ("vllm", "SamplingParams"),
    ("vllm.config", "LoadConfig"),
    ("vllm.v1.engine.async_llm", "AsyncLLM"),
    ("vllm.exceptions", "VLLMClientError"),
    ("vllm.v1.engine.exceptions", "EngineDeadError"),
    ("vllm.v1.metrics.loggers", "StatLoggerBase"),
    ("vllm.v1.sample.logits_processor", "LogitsProcessor"),
    ("vllm.model_executor.model_loader", "register_model_loader"),
    ("vllm.model_executor.model_loader.dummy_loader", "DummyModelLoader"),
    ("vllm.model_executor.layers.attention", "is_deferred_attention_layer"),
    ("vllm.model_executor.layers.logits_processor", "LogitsProcessor"),
    ("vllm.model_executor.model_loader.reload", "finalize_layerwise_processing"),
    ("vllm.model_executor.model_loader.reload", "finalize_layerwise_reload"),
    ("vllm.model_executor.model_loader.reload", "initialize_layerwise_reload"),
    ("vllm.model_executor.model_loader.reload.layerwise", "get_layerwise_info"),
    ("vllm.distributed.weight_transfer.base", "WeightTransferUpdateRequest"),
    ("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory"),
    ("vllm.sampling_params", "RequestOutputKind"),
    ("vllm.sampling_params", "StructuredOutputsParams"),
    ("vllm.v1.structured_output", "StructuredOutputManager"),
    ("vllm.v1.structured_output.backend_types", "StructuredOutputBackend"),
    ("vllm.v1.structured_output.backend_types", "StructuredOutputGrammar"),
    ("llguidance", "LLMatcher"),
)
"""What is used of vLLM, looked for at the start."""


REFILLED_BY = "0.32."
REFILLED = frozenset({"LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"})
"""Architectures whose instances give the same answers when other weights come into them as when they start with these,
on CPUs, not quantised: tests say so. Of others some do not, and no checksum shows it: kernels keep copies of their own.
"""
PROCESSES = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker")
"""What vLLM's processes import."""


class ConfigurationRefused(Exception):
    """vLLM's configuration of a model with its arguments fails: trying again changes nothing."""


def imported() -> words.Imported:
    """Import vLLM, which takes long. Raises ``ImportError`` where it is not there."""
    import importlib

    import vllm

    for module in PROCESSES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    lacks = []
    for module, name in NAMES:
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            lacks.append(f"{module}.{name}")
    return words.Imported(version=vllm.__version__, lacks=tuple(lacks))


class Front:
    """One model's vLLM. Event loop only."""

    def __init__(self, say: Callable[[msgspec.Struct], None]) -> None:
        self._say = say
        self._engine: Any = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """That were cancelled, and have not told vLLM yet."""
        self._outputs: list[words.Output] = []
        self._load = words.EngineLoad()
        self._steps: deque[words.EngineStep] = deque(maxlen=MAX_STEPS)
        self._step_began_s: float | None = None
        """When the step that runs began; None: none does."""
        self._max_step_tokens = 0
        self._is_dead = False
        self._fill_began_s = 0.0
        self._finishing: asyncio.Task[None] | None = None

    def start(self, start: words.Start) -> words.Started:
        """Blocks for as long as vLLM takes. Raises ``ConfigurationRefused``, and whatever vLLM raises."""
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        began_s = time.monotonic()
        os.environ[plugin.OURS] = str(os.getpid())
        grammars.tell(start.tokenizer)
        if start.arguments.get("enforce_eager"):
            plugin.compile_nothing()
        if current_platform.is_cpu():
            plugin.share_cores()
            plugin.draw_for_whole_prompts()
        try:
            config = AsyncEngineArgs(
                model=start.path,
                tokenizer=start.path,
                skip_tokenizer_init=True,
                generation_config="vllm",
                trust_remote_code=False,
                config_format="hf",  # what was checked, and no params.json beside it
                language_model_only=True,
                disable_log_stats=False,
                logits_processors=["blitz_vllm.continued:Continued"],
                load_format=weights.FORMAT,
                model_loader_extra_config={"socket": start.weights},
                weight_transfer_config={"backend": weights.FORMAT},
                **start.arguments,
            ).create_engine_config()
        except ValueError as error:
            raise ConfigurationRefused(f"{type(error).__name__}: {error}") from error
        if (size := config.model_config.get_vocab_size()) < start.vocab_size:
            raise ConfigurationRefused(
                f"vLLM reads a vocabulary of {size} tokens from config.json, the model was registered with "
                f"{start.vocab_size}"
            )
        # Its processes need not import what is imported here: on CPUs, vLLM would start each anew. No thread of OpenMP
        # has run in this process.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self._engine = AsyncLLM.from_vllm_config(config, stat_loggers=[self._stat_logger])
        config = self._engine.vllm_config
        self._max_step_tokens = config.scheduler_config.max_num_batched_tokens
        return words.Started(
            context_tokens=config.model_config.max_model_len,
            num_blocks=config.cache_config.num_gpu_blocks or 0,
            block_size=config.cache_config.block_size,
            seconds=time.monotonic() - began_s,
            refills=_refills(config),
        )

    async def fill(self, fill: words.Refill) -> None:
        """Other weights, and nothing of what was computed with the earlier ones."""
        if self._leaving:
            await asyncio.wait(self._leaving)
        self._fill_began_s = time.monotonic()
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = {"socket": fill.weights, "early": fill.early}
        with self._dies_with("other weights"):
            if not await self._engine.reset_prefix_cache():
                raise RuntimeError("the KV of the earlier weights is still in use")
            await self._engine.start_weight_update()
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))
            if fill.early:
                self._say(words.Opened())
            else:
                await self._finish()

    def finish(self) -> None:
        """All weights have been taken: no gate is needed any more."""

        async def finish() -> None:
            with self._dies_with("other weights"):
                await self._finish()

        self._finishing = asyncio.create_task(finish())

    async def _finish(self) -> None:
        await self._engine.finish_weight_update()
        self._say(words.Filled(seconds=time.monotonic() - self._fill_began_s))

    @contextlib.contextmanager
    def _dies_with(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing must be computed with what is there now
            self._die(f"{what}: {type(error).__name__}: {error}"[:4000])

    def _stat_logger(self, _config: object, _index: int = 0) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        front = self

        class Logger(StatLoggerBase):
            def __init__(self) -> None:
                pass

            def log_engine_initialized(self) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: object, **__: object) -> None:
                front._record(scheduler_stats, iteration_stats)

        return Logger()

    def _record(self, scheduler: Any, iteration: Any) -> None:
        load, changed = self._load, {"num_steps": self._load.num_steps + 1}
        self._time(iteration, time.monotonic())
        if scheduler is not None:
            changed |= {
                "running": scheduler.num_running_reqs,
                "waiting": scheduler.num_waiting_reqs,
                "kv_usage": scheduler.kv_cache_usage,
            }
        if iteration is not None:
            changed |= {
                "prompt_tokens_total": load.prompt_tokens_total + iteration.prompt_token_stats.computed,
                "generated_tokens_total": load.generated_tokens_total + iteration.num_generation_tokens,
                "preemptions_total": load.preemptions_total + iteration.num_preempted_reqs,
            }
        self._load = msgspec.structs.replace(load, **changed)

    def _time(self, iteration: Any, now_s: float) -> None:
        """Of a step that follows another one, or a request that came to an engine at rest, it is known how long it
        took."""
        began_s, self._step_began_s = self._step_began_s, now_s if self._running else None
        if iteration is None or began_s is None:
            return
        prompts = iteration.prompt_token_stats
        num_prompt_tokens = prompts.computed
        # A request that failed with its first token has none.
        num_decodes = max(0, iteration.num_generation_tokens - len(iteration.time_to_first_tokens_iter))
        if num_prompt_tokens + num_decodes > self._max_step_tokens:
            return  # pieces of it were in earlier steps, which do not say so
        if num_prompt_tokens or num_decodes:
            self._steps.append(words.EngineStep(num_prompt_tokens, num_decodes, now_s - began_s))

    async def say_load_forever(self) -> None:
        """When it has changed."""
        said = None
        while True:
            if self._load is not said:
                said = self._load
                steps = tuple(self._steps)
                self._steps.clear()
                self._say(msgspec.structs.replace(said, steps=steps))
            await asyncio.sleep(LOAD_EVERY_S)

    def add(self, request: words.Add) -> None:
        """Begin it. One of an id that runs is refused."""
        if request.id in self._running:
            self._put(words.Output(id=request.id, finish="error", error="there is one of this id"))
            return
        if not self._running:
            self._step_began_s = time.monotonic()
        self._running[request.id] = asyncio.create_task(self._run(request))

    def cancel(self, request: words.Leave) -> None:
        """End it without a word."""
        if (task := self._running.pop(request.id, None)) is not None:
            task.cancel()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _run(self, request: words.Add) -> None:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        first = True
        try:
            prompt: dict[str, Any] = {"prompt_token_ids": list(request.token_ids)}
            if request.cache_salt:
                prompt["cache_salt"] = request.cache_salt
            if request.alone:
                await self._begin_alone(request.id)
            async for result in self._engine.generate(prompt, _params(request), request.id):
                begins, first = first, False
                (choice,) = result.outputs
                if result.prompt_logprobs:  # with the first tokens; empty behind them
                    for piece in scores.pieces(request, result.prompt_logprobs):
                        self._say(piece)
                cached = (result.num_cached_tokens or 0) if begins else 0
                self._put(_output(request, choice, cached))
        except asyncio.CancelledError:
            raise
        except EngineDeadError as error:
            self._die(f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever vLLM says of a request is that request's end
            cause = error.__cause__ or error  # of an error that says no more than that there was one
            refused = first and isinstance(cause, ValueError | VLLMClientError)
            said = f"{type(cause).__name__}: {cause}"
            self._put(words.Output(id=request.id, finish="error", error=said, refused=refused))
        finally:
            if self._running.get(request.id) is asyncio.current_task():
                del self._running[request.id]

    async def _begin_alone(self, request_id: str) -> None:
        if self._leaving:
            await asyncio.wait(self._leaving)
        # vLLM's processes answer behind the steps that they have begun.
        await self._engine.collective_rpc("check_health")
        self._say(words.Alone(id=request_id))

    def _put(self, output: words.Output) -> None:
        if not self._outputs:
            # What a step brought to all requests is said at once: their tasks run before this does.
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        self._say(words.Outputs(outputs=tuple(outputs)))

    def _die(self, reason: str) -> None:
        if not self._is_dead:
            self._is_dead = True
            self._say(words.Failed(reason=reason))

    def answer(self) -> None:
        """Nothing, if the engine is dead: that has been said."""
        if not (self._is_dead or self._engine.errored):
            self._say(words.Well())

    async def watch(self) -> None:
        """Returns when vLLM's engine is dead."""
        while not (self._is_dead or self._engine.errored):
            await asyncio.sleep(0.1)
        self._die("vLLM's engine process ended")

    def close(self) -> None:
        """End vLLM's processes."""
        if self._engine is not None:
            self._engine.shutdown()


def _refills(config: Any) -> bool:
    import vllm
    from vllm.platforms import current_platform

    model = config.model_config
    is_known = vllm.__version__.startswith(REFILLED_BY) and current_platform.is_cpu()
    # What is compiled goes past gates, and what other weights do in it no test shows.
    is_plain = model.quantization is None and model.enforce_eager
    return bool(is_known and is_plain and model.architecture in REFILLED)


def _params(request: words.Add) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    how, guide = request.sampling, request.guide
    params = {
        "max_tokens": how.max_tokens,
        # Of an answer that follows a grammar, the matcher sees to it.
        "min_tokens": 0 if guide is not None else how.min_tokens,
        # Another one where it goes on: the same would draw the same numbers again.
        "seed": how.seed + request.num_output,
        "temperature": how.temperature,
        "top_p": how.top_p,
        "top_k": how.top_k,
        "stop_token_ids": list(how.stop_token_ids),
        "ignore_eos": True,
        "frequency_penalty": how.frequency_penalty,
        "presence_penalty": how.presence_penalty,
        "repetition_penalty": how.repetition_penalty,
        "logit_bias": dict(how.logit_bias) or None,
        "logprobs": how.logprobs,
        "prompt_logprobs": how.prompt_logprobs,
        "flat_logprobs": how.prompt_logprobs is not None,
        "detokenize": False,
        "output_kind": RequestOutputKind.DELTA,
        "extra_args": {words.NUM_OUTPUT: request.num_output} if request.num_output else None,
    }
    return SamplingParams(**params) if guide is None else grammars.guided(params, guide)


def _output(request: words.Add, choice: Any, cached_tokens: int) -> words.Output:
    logprobs = None
    if request.sampling.logprobs is not None and choice.logprobs is not None:
        logprobs = tuple(
            _logprobs(token_id, of, request.sampling.logprobs)
            for token_id, of in zip(choice.token_ids, choice.logprobs, strict=True)
        )
    reason = choice.finish_reason or ""
    return words.Output(
        id=request.id,
        token_ids=tuple(choice.token_ids),
        logprobs=logprobs,
        finish=reason if reason in ("", "stop", "length") else "error",
        error="" if reason in ("", "stop", "length") else f"vLLM ended it: {reason}",
        cached_tokens=cached_tokens,
    )


def _logprobs(token_id: int, of: dict[int, Any], num_top: int) -> words.Logprobs:
    best = sorted(of.items(), key=lambda item: item[1].rank)[:num_top]
    return words.Logprobs(of[token_id].logprob, tuple((other, value.logprob) for other, value in best))
