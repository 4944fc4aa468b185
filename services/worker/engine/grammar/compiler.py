"""Grammars of one model: compiled once per text, shared by the requests that follow them.

llguidance works lazily: the automaton of a grammar grows with the masks that are asked for. All requests of one grammar
share it, so that what one has met costs the others nothing; while one of them computes a mask the others wait.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.checkpoint import TOKENIZER_FILE
from shared.errors import BadCheckpoint, BadRequest
from shared.grammars import limits_of, llguidance_text
from shared.messages.generation import Grammar

Mask = npt.NDArray[np.int32]
"""A bit per token id, lowest first, as int32 ``[ceil(vocab_size / 32)]``."""

COMPILED_BYTES = 4 * 1024 * 1024
"""Of a compiled grammar beside its text. Measured: 1 to 3 MB after a few hundred masks of an ordinary schema, 20 MB
where ``max_lexer_states`` is reached."""
BYTES_PER_TEXT_BYTE = 256
"""Measured: 16 MB for 64 KiB of schema."""
MAX_CACHE_BYTES = 256 * 1024 * 1024
MAX_REASON_CHARACTERS = 300


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe; compiling releases the interpreter."""

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        vocab_size: int,
        end_ids: Sequence[int],
        max_cache_bytes: int = MAX_CACHE_BYTES,
    ) -> None:
        """``vocab_size``: of the logits, at least the tokenizer's. ``end_ids`` end an answer; they are allowed where a
        grammar may end, and only there. Takes about a second for 128k tokens. Raises ``BadCheckpoint``."""
        self.vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)
        self._tokenizer = _load(tokenizer_json, vocab_size, sorted(self.end_ids))
        # Without ends of ours it takes one of its own.
        self.hidden_ids = () if end_ids else tuple(self._tokenizer.eos_tokens)
        self._max_bytes = max_cache_bytes
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._bytes = 0

    @property
    def cached_bytes(self) -> int:
        """An estimate of what the compiled grammars occupy."""
        return self._bytes

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """From the cache, or made. Raises ``BadRequest`` for what is no grammar or costs too much."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found
        made = CompiledGrammar(grammar, self, self._tokenizer)
        with self._lock:
            # Another thread may have made it meanwhile.
            kept = self._compiled.setdefault(grammar, made)
            if kept is made:
                self._bytes += made.num_bytes
                while self._bytes > self._max_bytes and len(self._compiled) > 1:
                    self._bytes -= self._compiled.popitem(last=False)[1].num_bytes
            return kept


class CompiledGrammar:
    """A grammar that is ready to be followed."""

    def __init__(self, grammar: Grammar, compiler: GrammarCompiler, tokenizer: LLTokenizer) -> None:
        """Raises ``BadRequest``."""
        self.compiler = compiler
        self._tokenizer = tokenizer
        try:
            self._text = llguidance_text(grammar)
        except (ValueError, RecursionError) as error:
            raise refused(str(error)) from error
        self._limits = LLParserLimits(
            **asdict(limits_of(grammar)), precompute_large_lexemes=False, verbose_errors=False
        )
        self.num_bytes = COMPILED_BYTES + BYTES_PER_TEXT_BYTE * len(self._text)
        self._shared: LLMatcher | None = self.fresh()

    def start(self) -> LLMatcher:
        """At the grammar's start, with an automaton that others have too. Raises ``BadRequest``."""
        # Another thread may forget it between.
        shared = self._shared
        if shared is None:
            shared = self._shared = self.fresh()
        return shared.deep_copy()

    def fresh(self) -> LLMatcher:
        """At the grammar's start, with an automaton of its own. Raises ``BadRequest``."""
        made = LLMatcher(self._tokenizer, self._text, log_level=0, limits=self._limits)
        if made.is_error():
            raise refused(reason(made))
        return made

    def forget(self) -> None:
        """The shared automaton has met a limit, and computes nothing more: who starts from now on has another one."""
        self._shared = None


def fill(matcher: LLMatcher, out: Mask) -> bool:
    """Write which tokens may come next; releases the interpreter. False: the matcher is in an error. Raises
    ``ValueError`` for an array that is not as ``Mask`` says."""
    if not out.flags.c_contiguous or out.dtype != np.int32:
        raise ValueError(f"a mask must be int32 in one piece, not {out.dtype} with strides {out.strides}")
    matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
    return not matcher.is_error()


def refused(why: str) -> BadRequest:
    """The error of a grammar that cannot be followed."""
    return BadRequest(f"response_format: the answer cannot follow this grammar: {why}", param="response_format")


def reason(matcher: LLMatcher) -> str:
    """Why a matcher is in an error."""
    first = matcher.get_error().replace("<non-verbose/>", "").strip().partition("\n")[0]
    return first if len(first) <= MAX_REASON_CHARACTERS else first[:MAX_REASON_CHARACTERS] + "..."


def _load(tokenizer_json: bytes, vocab_size: int, end_ids: list[int]) -> LLTokenizer:
    try:
        text = tokenizer_json.decode().lstrip()
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"{TOKENIZER_FILE}: not UTF-8: {error}") from error
    # Anything else would be taken as the name of a file.
    if not text.startswith("{"):
        raise BadCheckpoint(f"{TOKENIZER_FILE}: not a JSON object")
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=end_ids or None)
    except (ValueError, OverflowError) as error:
        raise BadCheckpoint(f"{TOKENIZER_FILE}: no answers can follow a grammar: {error}") from error
