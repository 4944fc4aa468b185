"""One client request's progress: its attempts, the tokens it has so far, and the deaths of workers that had it.

Rules
- A stream has one current attempt; parts of any other attempt are foreign and dropped.
- A part is accepted when it starts at, or overlaps, the next offset; the overlap is skipped.
- A part beyond the next offset is a gap: the gateway asks the worker to send again from there.
- Output tokens survive attempts: the next attempt continues behind them.
- While two instances form a pair, and when a decode instance continues after a prefill instance, one takes requests
  over from the other under the same attempt. The first part of a worker that has not had the attempt yet announces
  that, with tokens or without, unless it only repeats what has arrived (as a decode instance first does with the
  first token). A worker that has had the attempt gets it back with new tokens only: anything else it says is late.

Rules of deaths (``docs/decisions/0015-poison.md``)
- A death counts only if the attempt had produced few tokens: a request that kills at some position of its text kills
  there again, at once, because each attempt continues behind the last token. A request that got further was not at
  fault, and earlier deaths are forgotten: it is past that position. This death is the first of a new series.
- After two deaths a request is suspected: it is computed alone until it is past the position. Its worker announces
  the start and the end of each of its steps.
- A further death counts only if the request was in a step of its own. That is the third: the request is poison.
- Deaths that other requests caused do not count, but are bounded: a cluster whose workers all die can serve no
  request.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from msgspec import structs

from shared.messages.generation import DecodePlace, FinishReason, SamplingParams, StreamPart
from shared.subjects import Process

SUSPECT_DEATHS = 2
POISON_DEATHS = 3
CLEARED_TOKENS = 16
"""With more new tokens than these, an attempt was past the position where the previous one died. Tokens of the last few
steps may be lost with the worker, so the position is known only roughly."""
MAX_OTHER_DEATHS = 20
"""In a row, without progress in between."""

MAX_NOTED_INSTANCES = 16
"""Of one request, for the log."""


@dataclass(frozen=True, slots=True)
class Deaths:
    """Of workers that had one request, without progress in between."""

    counted: int = 0
    others: int = 0
    """Of a suspect's workers, outside of its own steps."""
    workers: tuple[str, ...] = ()
    """The workers whose deaths count, in order."""

    @property
    def suspected(self) -> bool:
        """Whether the next attempt is computed alone."""
        return self.counted >= SUSPECT_DEATHS

    @property
    def poison(self) -> bool:
        """Whether there is no next attempt."""
        return self.counted >= POISON_DEATHS

    def after(self, worker_id: str, *, num_new_tokens: int, in_own_step: bool) -> Deaths:
        """With one more, in an attempt that brought so many tokens. ``in_own_step``: the worker had said that it was
        computing this request alone."""
        if num_new_tokens > CLEARED_TOKENS:
            return Deaths(1, 0, (worker_id,))
        if self.suspected and not in_own_step:
            return replace(self, others=self.others + 1)
        return replace(self, counted=self.counted + 1, workers=(*self.workers, worker_id))


class Phase(enum.Enum):
    """Where a stream is. ``QUEUED`` here, ``SUBMITTED`` to an instance, ``RUNNING`` once a part came, ``FINISHED``."""

    QUEUED = "queued"
    SUBMITTED = "submitted"
    RUNNING = "running"
    FINISHED = "finished"


class PartVerdict(enum.Enum):
    """What to do with a part: take it, drop it as already had, drop it as another attempt's, or ask again."""

    NEW = "new"
    DUPLICATE = "duplicate"
    FOREIGN = "foreign"
    GAP = "gap"


@dataclass(slots=True)
class StreamState:
    """The state of one stream. ``accept`` and the transitions below are the only mutators."""

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrived_at_s: float
    """Unix time."""
    model_hash: str = ""
    """The weights that the stream began with: it never continues on others of the same name."""
    key: str = ""
    """Name of the API key that the request came with; it waits for its turn among that key's requests."""
    priority: int = 0
    """Among the waiting requests of its key: lower ones go first."""
    cache_scope: str = ""
    """As in ``Submit``."""
    prompt_cache_key: str = ""
    """The caller's word for prompts that belong together."""
    beginning: int | None = None
    """Which prompts it belongs with (``affinity``); None: none in particular."""
    cached_tokens: int = 0
    """Tokens of its prompt that nobody had to compute, as the instance says that had it first."""
    default_max_tokens: bool = False
    """The caller left ``max_tokens`` open: it may still be cut to what an instance holds."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the output: the model's end-of-sequence tokens and the caller's stop tokens."""
    phase: Phase = Phase.QUEUED
    attempt: int = 0
    failures: int = 0
    """Attempts lost to a fault (an instance that was full, and a worker that died, do not count)."""
    deaths: Deaths = field(default_factory=Deaths)
    """Of workers that had it."""
    computing: bool = False
    """Its worker has said that it computes this request, alone, and not that it has done so."""
    attempt_offset: int = 0
    """Output tokens that were here when the current attempt began."""
    instance_id: str = ""
    worker: Process | None = None
    """Where the current attempt is; None while it is queued here."""
    submitted_s: float = 0.0
    """When the current attempt was handed to its instance; monotonic."""
    instances: list[str] = field(default_factory=list)
    """Those that have had it, the first ``MAX_NOTED_INSTANCES`` of them."""
    decode_at: DecodePlace | None = None
    """The decode instance that the current attempt was promised to."""
    may_wait: bool = True
    """Whether the current attempt may wait at its instance for a slot."""
    former_workers: set[Process] = field(default_factory=set)
    """Those from which another took the current attempt over."""
    avoid: set[str] = field(default_factory=set)
    """Instances that failed this stream; used again only when there is no other."""
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def prompt_offset(self) -> int | None:
        """The first position of the prompt whose log-probability is lacking; None: none is."""
        return None

    @property
    def num_known_tokens(self) -> int:
        """Tokens that an instance has to compute before the next new one."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def alone_tokens(self) -> int:
        """Tokens that its next attempt must bring before it is computed with others."""
        return CLEARED_TOKENS + 1 if self.deaths.suspected else 0

    def deaths_with_this(self) -> Deaths:
        """If the worker that has it died just now."""
        num_new_tokens = len(self.output_token_ids) - self.attempt_offset
        worker_id = self.worker.id if self.worker is not None else ""
        return self.deaths.after(worker_id, num_new_tokens=num_new_tokens, in_own_step=self.computing)

    @property
    def num_context_tokens(self) -> int:
        """Tokens of context that the whole request can take."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    def ended(self) -> FinishReason | None:
        """Why no token can follow those already here, if so (only the terminal part is missing)."""
        output = self.output_token_ids
        if output and output[-1] in self.end_token_ids and len(output) > self.sampling.min_tokens:
            return "stop"
        return "length" if len(output) >= self.sampling.max_tokens else None

    def cut_output(self, context_tokens: int) -> bool:
        """Make the request fit that context, if the caller left its length open. Returns whether it fits now."""
        max_tokens = context_tokens - len(self.prompt_token_ids)
        least = max(len(self.output_token_ids) + 1, self.sampling.min_tokens)
        if not self.default_max_tokens or max_tokens < least:
            return False
        self.sampling = structs.replace(self.sampling, max_tokens=max_tokens)
        return True

    def submitted_to(
        self,
        instance_id: str,
        worker: Process,
        decode_at: DecodePlace | None = None,
        *,
        may_wait: bool = True,
        now_s: float = 0.0,
    ) -> None:
        """A new attempt begins on that instance, to be decoded at another one if that is named. ``may_wait``: there,
        for a slot."""
        if self.phase is not Phase.QUEUED:
            raise ValueError(f"request {self.request_id} is {self.phase.value}, it cannot be submitted")
        self.attempt += 1
        self.phase = Phase.SUBMITTED
        self.submitted_s = now_s
        self._at(instance_id)
        self.worker = worker
        self.decode_at = decode_at
        self.may_wait = may_wait
        self.attempt_offset = len(self.output_token_ids)
        self.computing = False
        self.former_workers.clear()

    def taken_over(self, part: StreamPart, verdict: PartVerdict, *, instance_id: str, worker: Process) -> bool:
        """Follow the attempt to the worker that sent ``part``, just judged, if it has taken the attempt over.

        Returns whether it has.
        """
        if self.worker is None or worker == self.worker or verdict is PartVerdict.FOREIGN:
            return False
        if verdict is not PartVerdict.NEW:
            says_so = verdict is PartVerdict.GAP or (not part.token_ids and part.offset == len(self.output_token_ids))
            if not says_so or worker in self.former_workers:
                return False
        self.former_workers.add(self.worker)
        self._at(instance_id)
        self.worker = worker
        return True

    def _at(self, instance_id: str) -> None:
        self.instance_id = instance_id
        if instance_id not in self.instances and len(self.instances) < MAX_NOTED_INSTANCES:
            self.instances.append(instance_id)

    def requeued(self, *, fault: bool, avoid: bool | None = None, deaths: Deaths | None = None) -> None:
        """The current attempt is given up; what it already brought stays.

        ``fault``: it counts as failed. ``avoid``: the next one goes elsewhere if it can; by default after a fault.
        ``deaths``: what the workers' deaths come to.
        """
        if self.phase not in (Phase.SUBMITTED, Phase.RUNNING):
            raise ValueError(f"request {self.request_id} is {self.phase.value}, it has no attempt to give up")
        self.failures += fault
        self.deaths = deaths if deaths is not None else self.deaths
        if fault if avoid is None else avoid:
            self.avoid.add(self.instance_id)
            if self.decode_at is not None and self.phase is Phase.RUNNING:
                # It may have had the request already, without a token to show for it.
                self.avoid.add(self.decode_at.instance_id)
        self.phase = Phase.QUEUED
        self.instance_id = ""
        self.worker = None
        self.decode_at = None

    def finished(self) -> None:
        """Nothing is accepted any more."""
        self.phase = Phase.FINISHED

    def accept(self, part: StreamPart) -> tuple[PartVerdict, int]:
        """Judge a part; a ``NEW`` one's tokens are appended.

        Returns the verdict and how many of the part's leading tokens were already here.
        """
        if part.attempt != self.attempt or (self.phase is not Phase.RUNNING and self.phase is not Phase.SUBMITTED):
            return PartVerdict.FOREIGN, 0
        if part.computing is not None:
            self.computing = part.computing
        output = self.output_token_ids
        skip = len(output) - part.offset
        if skip >= 0 and not part.token_ids and part.finish_reason is None:
            # A worker's "nothing new": no progress, and no sign that the prompt was begun.
            return PartVerdict.DUPLICATE, 0
        if skip < 0:
            return PartVerdict.GAP, 0
        token_ids = part.token_ids
        if skip == 0:
            output.extend(token_ids)
        elif skip < len(token_ids):
            output.extend(token_ids[skip:])
        elif part.finish_reason is None or skip > len(token_ids):
            return PartVerdict.DUPLICATE, skip
        if part.cached_tokens > 0 and not part.offset:
            self.cached_tokens = min(part.cached_tokens, len(self.prompt_token_ids))
        self.phase = Phase.RUNNING
        return PartVerdict.NEW, skip
