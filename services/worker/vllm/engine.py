"""An unmodified vLLM as the engine of an instance."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import TypeVar

import msgspec

from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.leaving import Moving
from services.worker.core.scheduling.schedule import SchedulerLoad
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.core.scheduling.speed import SpeedEstimator
from services.worker.engine.loop import LoopStats, StepOutput
from services.worker.vllm.blitz_vllm import words
from services.worker.vllm.front_process import FrontProcess
from services.worker.vllm.served_model import ServedModel
from services.worker.vllm.turns import Key, Turns
from services.worker.vllm.warm import START_S, StartedFront, WarmFronts
from services.worker.vllm.weights_server import WeightsServer
from shared.aio import in_thread
from shared.errors import (
    BadRequest,
    BlitzError,
    Conflict,
    ContextLengthExceeded,
    EngineBroken,
    Internal,
    Overloaded,
    Unavailable,
    UnsupportedParameter,
)
from shared.grammars import limits_of, llguidance_text
from shared.messages.common import ErrorInfo
from shared.messages.destinations import SendBack
from shared.messages.generation import FinishReason, PromptLogprobs, StreamPart, TokenLogprobs

log = logging.getLogger(__name__)

T = TypeVar("T")
GUIDE = "response_format"
LOOK_S = 1.0
HUNG_S, HUNG_STEPS = 300.0, 10.0
"""Requests wait, and nothing is computed: so long, and so many times the longest step that was seen."""
SCORED_BYTES, MAX_SCORED_BYTES = 17, 2 << 30
"""What vLLM takes for each token and entry of the vocabulary (measured on a CPU), and what it may take at once."""
FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "error": "error"}


class VllmEngine:
    """``ServingEngine``. Event loop only, but for ``join``."""

    def __init__(
        self,
        model: ServedModel,
        weights: WeightsServer,
        on_output: Callable[[StepOutput], None],
        on_failure: Callable[[BlitzError], None],
        warm: WarmFronts,
        *,
        early: bool = False,
    ) -> None:
        """``on_failure``: it serves nothing any more. ``warm``: whose processes it uses. ``early``: it is to take
        requests before it has all weights, if it can."""
        self.limits = model.limits
        self._model = model
        self._weights = weights
        self._on_output = on_output
        self._on_failure = on_failure
        self._warm = warm
        self._early = early
        self._opened: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it does."""
        self._finishing: asyncio.Task[None] | None = None
        self._front: FrontProcess | None = None
        self._takes_others = False
        self._owned = True
        """Its process saw nothing of the memory that it had weights from before."""
        self._had_them = False
        """Its process waited with the weights of this model."""
        self._is_kept = False
        """Its process waits for the next instance."""
        self._before = words.EngineLoad()
        """What the process's counters were when this instance got it."""
        self._requests: dict[Key, ActiveSequence] = {}
        self._turns = Turns(self._say, self._word_of, self._announce)
        self._load = words.EngineLoad()
        self._speed = SpeedEstimator()
        self._ended_requests = self._ended_tokens = self._cached_tokens = 0
        self._busy_s, self._loaded_at_s = 0.0, time.monotonic()
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started.add_done_callback(lambda started: started.cancelled() or started.exception())
        self._stop_error: BlitzError | None = None
        self._closing: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of vLLM's process, which leads a group of its own; None before it has started."""
        return None if self._front is None else self._front.pid

    # --- its life ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """A process starts, and takes the weights as they come; or one that waits goes on."""
        self._starting = asyncio.create_task(self._start())

    def _is_stopped(self) -> bool:
        return self._stop_error is not None

    async def _start(self) -> None:
        if self._is_stopped():
            return
        try:
            self._warm.check(self._model.shape)
            await in_thread(self._model.check)
            if self._is_stopped():
                return
            shape, model_hash = self._model.shape, self._model.model_hash
            started = await self._warm.take_started(shape, model_hash, lambda: not self._is_stopped())
            if self._is_stopped():  # meanwhile
                if started is not None and not self._warm.keep(started):
                    started.front.close()
                return
            front = self._front = started.front if started is not None else await self._warm.take()
            if self._is_stopped():  # meanwhile
                self._front = None
                self._warm.give_back(front)
                return
            front.attach(self._on_word, self._on_end)
            if started is not None:
                self._go_on(front, started)
            elif front.imported is not None:
                self._on_word(front.imported)
        except Exception as error:  # whatever it is, nobody must wait for it
            log.warning("no vLLM: %s", error, exc_info=not isinstance(error, BlitzError | OSError))
            self._on_end(str(error) or type(error).__name__)

    def _go_on(self, front: FrontProcess, started: StartedFront) -> None:
        self._takes_others, self._owned = started.takes_others, started.owns_weights
        self._before = self._load = msgspec.structs.replace(started.load, running=0, waiting=0)
        if started.model_hash == self._model.model_hash:
            log.info("vLLM waited with the weights of this model")
            self._had_them = True
            self._opens(True)
            self._serves()
            return
        front.say(words.Refill(weights=self._listen(front), early=self._early))
        if self._early:
            self._finishing = asyncio.create_task(self._finish(front))

    async def _finish(self, front: FrontProcess) -> None:
        await self._weights.taken.wait()
        front.say(words.FinishRefill())

    async def until_open(self) -> bool:
        """See ``ServingEngine``."""
        return await asyncio.shield(self._opened)

    @property
    def has_own_weights(self) -> bool:
        """See ``ServingEngine``."""
        return self._owned and (self._had_them or self._weights.is_free)

    @property
    def _is_open(self) -> bool:
        return self._opened.done() and self._opened.result()

    def _opens(self, early: bool) -> None:
        if not self._opened.done():
            self._opened.set_result(early)

    def _serves(self) -> None:
        self._opens(False)
        if not self._started.done():
            self._started.set_result(None)
            self._watching = asyncio.create_task(self._watch_steps())

    async def _watch_steps(self) -> None:
        """What hangs is no engine: requests go on elsewhere."""
        longest_s, num_steps, still_s = 0.0, self._load.num_steps, 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            still_s += LOOK_S  # not by the clock: this process may have stood still, too
            if not self._requests or self._load.num_steps != num_steps:
                if self._requests:
                    longest_s = max(longest_s, still_s)
                num_steps, still_s = self._load.num_steps, 0.0
            elif still_s > max(HUNG_S, HUNG_STEPS * longest_s):
                self._on_end(f"vLLM has computed nothing for {still_s:.0f} s, with {len(self._requests)} requests")
                return

    def _listen(self, front: FrontProcess) -> str:
        front.num_weights += 1
        path = str(front.folder / f"weights-{front.num_weights}.sock")
        self._weights.listen(path)
        return path

    def start(self) -> None:
        """Nothing: it has been starting since ``prepare``."""

    async def until_ready(self) -> None:
        """See ``ServingEngine``."""
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(self._started)
        except TimeoutError:
            said = self._front.last_words if self._front is not None else "it has no process"
            why = f"vLLM did not start within {START_S:g} s: {said}"
            self._warm.failed(self._model.shape, why)
            raise EngineBroken(why) from None

    def stop(self, error: BlitzError | None = None) -> None:
        """See ``ServingEngine``."""
        is_well = self._stop_error is None and error is None
        if self._stop_error is None:
            self._stop_error = error or Unavailable("the engine stopped")
        self._end_all(ErrorInfo.of(self._stop_error))
        self._opens(False)
        for task in (self._watching, self._finishing):
            if task is not None:
                task.cancel()
        front = self._front
        if front is not None and not self._is_kept:
            is_started = self._started.done() and not self._started.cancelled() and self._started.exception() is None
            shape, model_hash = self._model.shape, self._model.model_hash
            kept = StartedFront(front, shape, model_hash, self.has_own_weights, self._takes_others, self._load)
            self._is_kept = is_well and is_started and self._warm.keep(kept)
            if not self._is_kept:
                front.close()
        self._closing = asyncio.ensure_future(self._weights.close())

    def join(self, timeout_s: float) -> bool:
        """See ``ServingEngine``."""
        return self._front is None or self._is_kept or self._front.join(timeout_s)

    def _on_word(self, word: words.ToWorker) -> None:
        if isinstance(word, words.Outputs):
            self._take(word.outputs)
        elif isinstance(word, words.PromptScores):
            self._take_scores(word)
        elif isinstance(word, words.EngineLoad):
            self._take_load(word)
        elif isinstance(word, words.Imported):
            if word.lacks:
                self._on_end(word.refusal)
                return
            front = self._front
            assert front is not None
            front.say(self._model.start(self._listen(front)))
        elif isinstance(word, words.Alone):
            self._turns.begins(word.id)
        elif isinstance(word, words.Opened):
            self._opens(True)
        elif isinstance(word, words.Started | words.Filled):
            if isinstance(word, words.Started):
                self._takes_others = word.refills
            log.info("vLLM takes requests after %.1f s: %s", word.seconds, word)
            self._warm.served(self._model.shape)
            self._serves()
        elif isinstance(word, words.Failed):
            self._on_end(word.reason)

    def _on_end(self, why: str) -> None:
        """It serves nothing, or nothing any more."""
        if self._stop_error is not None:
            return
        self._stop_error = EngineBroken(why)
        if not self._started.done() and self._front is not None:
            self._warm.failed(self._model.shape, why, is_final=self._front.failure_is_final)
        self._opens(False)
        for task in (self._watching, self._finishing):
            if task is not None:
                task.cancel()
        if self._front is not None:
            self._front.close()
        if not self._started.done():
            self._started.set_exception(self._stop_error)
            if not self._is_open:
                return  # the load fails, and nobody's request is here
        self._end_all(ErrorInfo.of(self._stop_error))
        self._on_failure(self._stop_error)

    # --- requests ------------------------------------------------------------------------------

    def submit(self, sequence: ActiveSequence) -> Future[None]:
        """See ``ServingEngine``."""
        return self._answer(lambda: self._submit(sequence))

    def _submit(self, sequence: ActiveSequence) -> None:
        if sequence.key in self._requests:
            raise Conflict(f"attempt {sequence.attempt} of request {sequence.request_id} is here already")
        if sequence.is_guided and not self._model.tokenizer.end_ids:
            raise UnsupportedParameter("no answer of this model ends, and so none follows a grammar", param=GUIDE)
        limit = self.limits.limit_tokens
        if len(sequence.prompt) >= limit:
            raise ContextLengthExceeded(f"{len(sequence.prompt)} tokens of a prompt, of at most {limit - 1}")
        if (reason := sequence.finish_reason(limit)) is not None:
            self._on_output(StepOutput((sequence.end(reason),)))
            return
        if len(self._requests) >= self.limits.max_num_sequences + self.limits.max_queued_requests:
            raise Overloaded(f"{len(self._requests)} requests are here")
        queued = sum(s.num_tokens for s in self._requests.values() if not s.num_emitted)
        # As with our engine, a queue that is empty takes any prompt that fits.
        if queued and queued + sequence.num_tokens > self.limits.max_queued_tokens:
            raise Overloaded(f"{queued} tokens are queued, the limit is {self.limits.max_queued_tokens}")
        if sequence.is_scoring:
            self._check_scoring(len(sequence.prompt))
        sequence.arrived_s = time.monotonic()
        try:
            self._turns.add(sequence)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"response_format: no answer can follow this: {error}", param=GUIDE) from error
        self._requests[sequence.key] = sequence

    def _word_of(self, sequence: ActiveSequence, name: str) -> words.Add:
        return _add(sequence, name, self.limits.limit_tokens, self._model.tokenizer.end_ids)

    def _announce(self, sequence: ActiveSequence, begins: bool) -> None:
        self._on_output(StepOutput((sequence.computing(begins),)))

    def _check_scoring(self, num_tokens: int) -> None:
        """vLLM makes the logits of all tokens of a step that are scored at once."""
        step, others = self.limits.max_batch_tokens, (s for s in self._requests.values() if s.is_scoring)
        most = max(1, MAX_SCORED_BYTES // (SCORED_BYTES * self._model.vocab_size))
        if min(num_tokens, step) > most:
            raise UnsupportedParameter(
                f"prompt_logprobs: vLLM would score {min(num_tokens, step)} tokens of this model at once, and there is "
                f"memory for {most}: set max_num_batched_tokens in its arguments to so many",
                param="prompt_logprobs",
            )
        if min(num_tokens + sum(len(s.prompt) for s in others if not s.num_emitted), step) > most:
            raise Overloaded("as many prompts are being scored as there is memory for")

    def _say(self, word: words.Add | words.Leave) -> None:
        if self._front is not None:
            self._front.say(word)

    def cancel(self, request_id: str, attempt: int) -> Future[bool]:
        """See ``ServingEngine``."""
        return self._answer(lambda: self._drop([(request_id, attempt)]) > 0)

    def cancel_gateway(self, gone: Gone) -> Future[int]:
        """See ``ServingEngine``."""
        theirs = [key for key, s in self._requests.items() if gone.had(s.gateway_id, s.gateway_incarnation)]
        return self._answer(lambda: self._drop(theirs))

    def _drop(self, keys: Iterable[Key]) -> int:
        """Forget these; how many were here."""
        dropped: list[ActiveSequence] = []
        for key in keys:
            if (sequence := self._requests.pop(key, None)) is not None:
                sequence.finished = True
                dropped.append(sequence)
        for sequence in dropped:
            self._turns.drop(sequence)
        return len(dropped)

    def count_requests(self) -> Future[int]:
        """See ``ServingEngine``."""
        return self._answer(lambda: len(self._requests))

    def keep_tbt(self, slo_tbt_s: float) -> None:
        """vLLM sizes its steps by itself."""

    def see_off(self, _bytes_per_s: float, send_back: SendBack, goes: ErrorInfo) -> Future[list[Moving]]:
        """All go back: none is moved with its KV."""

        def see_off() -> list[Moving]:
            if send_back != "none":
                self._end_all(goes)
            return []

        return self._answer(see_off)

    def hand_back(self, leaves: ErrorInfo) -> Future[None]:
        """See ``ServingEngine``."""
        return self._answer(lambda: self._end_all(leaves))

    def _end_all(self, error: ErrorInfo) -> None:
        ended = [sequence.end("error", error) for sequence in self._requests.values()]
        self._drop(list(self._requests))
        if ended:
            self._on_output(StepOutput(tuple(ended)))

    def _answer(self, answer: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            if self._stop_error is not None:
                raise self._stop_error
            future.set_result(answer())
        except BlitzError as error:
            future.set_exception(error)
        return future

    # --- what vLLM says ------------------------------------------------------------------------

    def _take(self, outputs: Iterable[words.Output]) -> None:
        there = [(sequence, output) for output in outputs if (sequence := self._turns.of(output.id)) is not None]
        parts = [part for sequence, output in there if (part := self._part(sequence, output)) is not None]
        if parts:
            self._on_output(StepOutput(tuple(parts)))
        for sequence, _ in there:
            self._turns.advanced(sequence)

    def _take_scores(self, scores: words.PromptScores) -> None:
        sequence = self._turns.of(scores.id)
        if sequence is None:
            return  # it has left
        logprobs = PromptLogprobs(
            start=scores.start,
            num_top=scores.num_top,
            logprobs=scores.logprobs,
            ranks=scores.ranks,
            top_ids=scores.top_ids,
            top_logprobs=scores.top_logprobs,
        )
        self._on_output(StepOutput((), prompts=(sequence.scored(logprobs),)))

    def _part(self, sequence: ActiveSequence, output: words.Output) -> StreamPart | None:
        offset, first = len(sequence.output), sequence.num_emitted == 0
        sequence.append_all(list(output.token_ids))
        if first and output.token_ids:
            sequence.first_scheduled_s = time.monotonic()
            sequence.num_cached = min(output.cached_tokens, len(sequence.prompt))
            self._cached_tokens += sequence.num_cached
        finish = FINISH.get(output.finish)
        if finish is not None:
            sequence.finished = True
            del self._requests[sequence.key]
            if finish != "error":
                self._ended_requests += 1
                self._ended_tokens += len(sequence.output)
        elif not output.token_ids:
            return None
        logprobs = output.logprobs
        return StreamPart(
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            offset=offset,
            token_ids=output.token_ids,
            logprobs=None
            if logprobs is None
            else tuple(TokenLogprobs(logprob=one.logprob, top=one.top) for one in logprobs),
            finish_reason=finish,
            error=ErrorInfo.of(_error(sequence, output)) if finish == "error" else None,
            cached_tokens=sequence.num_cached if first else 0,
        )

    def _take_load(self, load: words.EngineLoad) -> None:
        now_s = time.monotonic()
        if self._load.running or load.running:
            self._busy_s += now_s - self._loaded_at_s
        self._load, self._loaded_at_s = load, now_s
        for step in load.steps:
            if min(step.prompt_tokens, step.decodes) < 0 or not step.prompt_tokens + step.decodes:
                continue
            self._speed.stepped(step.prompt_tokens, step.decodes, step.seconds)

    def stats(self) -> LoopStats:
        """See ``ServingEngine``."""
        load, before, requests = self._load, self._before, self._requests.values()
        waiting = [sequence for sequence in requests if not sequence.num_emitted]
        running = len(requests) - len(waiting)
        limits = self.limits
        return LoopStats(
            SchedulerLoad(
                queued_requests=len(waiting),
                queued_tokens=sum(sequence.num_tokens for sequence in waiting),
                running_requests=running,
                running_tokens=sum(sequence.num_tokens for sequence in requests if sequence.num_emitted),
                kv_blocks_used=round(load.kv_usage * limits.num_blocks),
                kv_blocks_total=limits.num_blocks,
                prefill_tokens_total=load.prompt_tokens_total - before.prompt_tokens_total,
                decode_tokens_total=load.generated_tokens_total - before.generated_tokens_total,
                preemptions_total=load.preemptions_total - before.preemptions_total,
                oldest_arrived_s=min((s.arrived_s for s in waiting if s.arrived_s is not None), default=None),
                kv_block_tokens=limits.block_size,
                ended_requests_total=self._ended_requests,
                ended_tokens_total=self._ended_tokens,
                cached_tokens_total=self._cached_tokens,
            ),
            self._busy_s,
            self._speed.speed,
        )


def _error(sequence: ActiveSequence, output: words.Output) -> BlitzError:
    if sequence.is_guided:
        # A grammar that does not compile, or met a limit; vLLM says no more than that.
        return BadRequest(f"response_format: the answer cannot follow this grammar: {output.error}", param=GUIDE)
    return BadRequest(f"vLLM refuses this: {output.error}") if output.refused else Internal(output.error)


def _guide(sequence: ActiveSequence) -> words.GuideWord | None:
    """Raises ``ValueError`` for a text that is no grammar."""
    params = sequence.params
    grammar = params.grammar
    if grammar is None:
        return None
    least = params.max_tokens if params.ignore_eos else params.min_tokens
    return words.GuideWord(
        text=llguidance_text(grammar),
        limits=asdict(limits_of(grammar)),
        min_tokens=least,
        stop_ids=tuple(sorted(sequence.stop_ids)),
    )


def _add(sequence: ActiveSequence, name: str, limit_tokens: int, end_ids: tuple[int, ...]) -> words.Add:
    """A request in vLLM's words: what was put out is part of its prompt, and its limits are of what is to come. Raises
    ``ValueError`` for a grammar that is none."""
    params, num_output = sequence.params, len(sequence.output)
    stop_ids = {*sequence.stop_ids, *(end_ids if sequence.is_guided else ())}
    max_tokens = max(1, min(params.max_tokens - num_output, limit_tokens - sequence.num_tokens))
    return words.Add(
        id=name,
        token_ids=tuple(sequence.tokens),
        num_output=num_output,
        # KV that nobody is to find has a salt that nobody else has; the request itself may come back for it.
        cache_salt=sequence.cache_scope or f"{sequence.request_id} alone",
        guide=_guide(sequence),
        alone=sequence.alone,
        sampling=words.Sampling(
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, max(0, params.min_tokens - num_output)),
            seed=params.seed,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop_token_ids=tuple(sorted(stop_ids)),
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs if sequence.is_scoring else None,
        ),
    )
