"""Masks of one instance's requests, made in threads beside its steps.

What takes time, loading the tokenizer, compiling, replaying what was put out before, a mask, is done there, in order
for each request. The engine's thread only hands tokens over and asks whether the mask is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path

import numpy as np

from services.worker.core.scheduling.guidance import Guidance
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.forward_batch import Bits
from services.worker.engine.grammar.compiler import GrammarCompiler
from services.worker.engine.grammar.matcher import GrammarMatcher
from shared.checkpoint import TOKENIZER_FILE, check_file, read_file
from shared.errors import BadCheckpoint, BlitzError, Internal, Unavailable
from shared.messages.common import ErrorInfo
from shared.messages.generation import Grammar
from shared.messages.registry import ModelRecord

NUM_THREADS = 2
"""Of an instance: masks take microseconds, compiling now and then a tenth of a second."""


class GrammarGuides:
    """Of one instance. ``load`` makes what compiles, at the first request that needs it, since it holds the interpreter
    for as long as the vocabulary is large. It may raise ``BlitzError``; then it is tried again with the next one."""

    def __init__(self, load: Callable[[], GrammarCompiler], wake: Callable[[], object]) -> None:
        """``wake`` is called, in a thread, whenever a mask has come."""
        self._load = load
        self._wake = wake
        self._loading = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")

    @property
    def compiler(self) -> GrammarCompiler:
        """In a thread. Raises what loading it does."""
        with self._loading:
            if self._compiler is None:
                self._compiler = self._load()
            return self._compiler

    def guide(self, sequence: ActiveSequence) -> Guidance:
        """Begin behind what it has put out."""
        grammar = sequence.params.grammar
        assert grammar is not None
        return MatchedGuidance(self, grammar, tuple(sequence.output))

    def submit(self, work: Callable[[], Bits | ErrorInfo]) -> Future[Bits | ErrorInfo]:
        """In a thread."""
        future = self._threads.submit(work)
        future.add_done_callback(lambda _: self._wake())
        return future


class MatchedGuidance:
    """``Guidance`` and ``Masks`` of one request."""

    def __init__(self, guides: GrammarGuides, grammar: Grammar, output: tuple[int, ...]) -> None:
        self.was_late = False
        self._guides = guides
        self._matcher: GrammarMatcher | None = None
        """Of the thread that makes the next mask; nobody's once that is there."""
        self._is_complete = False
        self._next = guides.submit(lambda: self._in_thread(lambda: self._begin(grammar, output)))

    @property
    def is_ready(self) -> bool:
        return self._next.done()

    @property
    def is_complete(self) -> bool:
        return self._next.done() and self._is_complete

    def mask(self, wait_s: float = 0.0) -> Bits | ErrorInfo | None:
        """See ``Masks``."""
        if not self._next.done() and wait_s <= 0:
            return None
        try:
            return self._next.result(wait_s)
        except (NotInTime, CancelledError):
            return None

    def accept(self, token_id: int) -> None:
        """See ``Guidance``. What goes wrong is said in place of the next mask."""
        self._next = self._guides.submit(lambda: self._in_thread(lambda: self._accept(token_id)))

    def close(self) -> None:
        """See ``Guidance``."""
        self._next.cancel()

    def _begin(self, grammar: Grammar, output: tuple[int, ...]) -> None:
        self._matcher = GrammarMatcher(self._guides.compiler.compile(grammar))
        self._matcher.replay(output)

    def _accept(self, token_id: int) -> None:
        assert self._matcher is not None
        self._matcher.accept(token_id)

    def _in_thread(self, advance: Callable[[], None]) -> Bits | ErrorInfo:
        try:
            advance()
            return self._bits()
        except BlitzError as error:
            return ErrorInfo.of(error)
        except BaseException as error:  # noqa: BLE001 - a fault of one request's grammar, also of its library, is its own
            return ErrorInfo.of(Internal(f"its grammar failed: {type(error).__name__}: {error}"))

    def _bits(self) -> Bits:
        compiler, matcher = self._guides.compiler, self._matcher
        assert matcher is not None
        bits = np.zeros(-(-compiler.vocab_size // 32), np.int32)
        self._is_complete = matcher.is_complete
        if self._is_complete:
            words = bits.view(np.uint32)
            for token_id in compiler.end_ids:
                words[token_id // 32] |= np.uint32(1 << token_id % 32)
        else:
            matcher.mask(bits)
        return bits


def compiler_of(record: ModelRecord) -> GrammarCompiler:
    """Of a registered model, with the tokenizer in its directory. Raises ``Unavailable`` where this worker cannot read
    that, or it is another one by now: other workers may."""
    file, spec = Path(record.path) / TOKENIZER_FILE, record.basics
    try:
        content = read_file(file)
        check_file(record.files, file, content)
        if content is None:
            raise BadCheckpoint(f"{file}: missing")
        return GrammarCompiler(content, vocab_size=spec.vocab_size, end_ids=spec.eos_token_ids)
    except BlitzError as error:
        raise Unavailable(f"this worker keeps no output to a grammar: {error.message}") from error
