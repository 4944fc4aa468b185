"""Answers that follow a grammar of the worker's, in vLLM's process of the engine, also where they go on.

vLLM makes masks and asks for a matcher of each request. What it would make itself begins anew with an answer that goes
on, and has none of the limits under which the gateway took the grammar; here a matcher is llguidance's, as the worker's
own, and has read what was put out elsewhere. Needs none of vLLM's tokenizers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .words import NUM_OUTPUT, GuideWord, Tokenizer

if TYPE_CHECKING:
    import torch

TOKENIZER = "BLITZ_VLLM_TOKENIZER"
"""In the environment: ``Tokenizer`` as JSON."""
NUM_THREADS = 2
_MAX_KEPT = 16
"""Compiled grammars, whose automata their requests share: 10 to 20 MB where their limits are met."""


def tell(tokenizer: Tokenizer) -> None:
    """Those that this process starts."""
    os.environ[TOKENIZER] = msgspec.json.encode(tokenizer).decode()


def guided(params: dict[str, Any], guide: GuideWord) -> Any:
    """vLLM's parameters of a request that follows a grammar."""
    from vllm.sampling_params import StructuredOutputsParams

    follows = StructuredOutputsParams(grammar=msgspec.json.encode(guide).decode())
    follows._backend = "guidance"
    return _guided_params()(structured_outputs=follows, **params)


@functools.cache
def _guided_params() -> Any:
    from vllm import SamplingParams

    class Guided(SamplingParams):
        def _validate_structured_outputs(self, *_: object) -> None:
            """The worker has checked the grammar, and vLLM has no tokenizer here."""

    return Guided


def install() -> None:
    """Make vLLM's masks, in this process, by our matchers."""
    from vllm.v1.structured_output import StructuredOutputManager

    begin, create = StructuredOutputManager.__init__, StructuredOutputManager._create_grammar

    def __init__(self: Any, vllm_config: Any) -> None:  # noqa: N807 - in its place
        begin(self, vllm_config)
        told = msgspec.json.decode(os.environ[TOKENIZER], type=Tokenizer)
        self.executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self.backend = _backend(told, vllm_config.model_config.get_vocab_size(), self.executor)

    def _create_grammar(self: Any, request: Any) -> Any:
        grammar = create(self, request)
        num_output = (request.sampling_params.extra_args or {}).get(NUM_OUTPUT, 0)
        if num_output and not grammar.accept_tokens(request.request_id, request.prompt_token_ids[-num_output:]):
            raise ValueError("what was put out before does not follow the grammar")
        return grammar

    StructuredOutputManager.__init__ = __init__
    StructuredOutputManager._create_grammar = _create_grammar


def _read(told: Tokenizer) -> str:
    """``tokenizer.json``. Raises ``ValueError`` for another one than was registered."""
    content = Path(told.file).read_bytes() if told.sha256 else b""
    if not told.sha256 or hashlib.sha256(content).hexdigest() != told.sha256:
        raise ValueError(f"{told.file} is not the tokenizer that was registered")
    text = content.decode().lstrip()
    # Anything else would be taken as the name of a file.
    if not text.startswith("{"):
        raise ValueError(f"{told.file} holds no JSON object")
    return text


class _Compiler:
    """Grammars of one model. Thread-safe."""

    def __init__(self, told: Tokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.end_ids = told.end_ids
        self._lock = threading.Lock()
        self._text, self._why = "", ""
        try:
            self._text = _read(told)
        except (OSError, ValueError) as error:
            self._why = str(error)
        self._tokenizer: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def fresh(self, guide: GuideWord) -> Any:
        """At the grammar's start, with an automaton of its own. Raises ``ValueError``."""
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        with self._lock:
            if self._why:
                raise ValueError(self._why)
            if self._tokenizer is None:  # takes about a second for 128k tokens
                self._tokenizer = LLTokenizer(self._text, n_vocab=self.vocab_size, eos_token=sorted(self.end_ids))
        limits = LLParserLimits(**guide.limits, precompute_large_lexemes=False, verbose_errors=False)
        made = LLMatcher(self._tokenizer, guide.text, log_level=0, limits=limits)
        if made.is_error():
            raise ValueError(made.get_error()[:500])
        return made

    def shared(self, guide: GuideWord) -> Any:
        """At the grammar's start, with an automaton that others have, too."""
        key = _key(guide)
        with self._lock:
            made = self._compiled.get(key)
            if made is not None:
                self._compiled.move_to_end(key)
        if made is None:
            made = self.fresh(guide)
            with self._lock:
                self._compiled[key] = made
                while len(self._compiled) > _MAX_KEPT:
                    self._compiled.popitem(last=False)
        return made.deep_copy()

    def forget(self, guide: GuideWord) -> None:
        """Its automaton has met a limit, and computes nothing more: who starts from now on has another one."""
        with self._lock:
            self._compiled.pop(_key(guide), None)


def _key(guide: GuideWord) -> str:
    return json.dumps([guide.text, guide.limits])


def _backend(told: Tokenizer, vocab_size: int, executor: ThreadPoolExecutor) -> Any:
    from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

    class Matcher(StructuredOutputGrammar):
        """Of one request. Errors are final: only an end may follow, and that is then refused."""

        def __init__(self, compiler: _Compiler, guide: GuideWord) -> None:
            self._compiler, self._guide = compiler, guide
            self._matcher = compiler.shared(guide)
            self._has_own = False
            self._taken: list[int] = []
            self._has_ended = False

        @property
        def _is_complete(self) -> bool:
            return bool(self._matcher.is_stopped() and not self._matcher.is_error())

        def _start_over(self) -> bool:
            """The limits may have been met by others of the same grammar. Whether it goes on, by itself."""
            if self._has_own:
                return False
            self._has_own = True
            self._compiler.forget(self._guide)
            try:
                self._matcher = self._compiler.fresh(self._guide)
            except ValueError:  # nothing that is raised here is this request's alone
                return False
            return not self._taken or bool(self._matcher.consume_tokens(self._taken))

        def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:  # noqa: ARG002 - vLLM's word
            for token in tokens:
                if self._has_ended:
                    return False
                if token in told.end_ids:
                    if self._matcher.is_error() or not (self._is_complete or self._matcher.is_accepting()):
                        return False
                    self._has_ended = True
                    continue
                if not 0 <= token < vocab_size or not self._consume(token):
                    return False
                self._taken.append(token)
            return True

        def _consume(self, token: int) -> bool:
            if self._matcher.consume_tokens([token]):
                return True
            return self._start_over() and bool(self._matcher.consume_tokens([token]))

        def validate_tokens(self, tokens: list[int]) -> list[int]:
            return tokens[: self._matcher.validate_tokens(tokens)]

        def rollback(self, num_tokens: int) -> None:
            back = num_tokens - self._has_ended
            self._has_ended = False
            if back > 0:
                del self._taken[-back:]
                self._matcher.rollback(back)

        def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
            row = bitmask[batch_index].numpy()
            if not self._is_complete and self._fill(row):
                return
            row[:] = 0
            _set(row, told.end_ids, True)

        def _fill(self, row: Any) -> bool:
            """Whether anything may follow but the end that nothing else is left for."""
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_error():
                if not self._start_over():
                    return False
                self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_error():
                return False
            if len(self._taken) < self._guide.min_tokens:
                _set(row, (*told.end_ids, *self._guide.stop_ids), False)
            return bool(row.any())

        def is_terminated(self) -> bool:
            return self._has_ended

        def reset(self) -> None:
            self._matcher.reset()
            self._taken, self._has_ended = [], False

    class Backend(StructuredOutputBackend):
        def __init__(self) -> None:
            self._compiler = _Compiler(told, vocab_size)

        def compile_grammar(self, request_type: object, grammar_spec: str, **_: object) -> Matcher:  # noqa: ARG002
            return Matcher(self._compiler, msgspec.json.decode(grammar_spec, type=GuideWord))

        def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
            import torch

            return torch.full((max_num_seqs, -(-vocab_size // 32)), -1, dtype=torch.int32)

        def destroy(self) -> None:
            executor.shutdown(wait=False, cancel_futures=True)

    return Backend()


def _set(row: Any, token_ids: tuple[int, ...], is_set: bool) -> None:
    words = row.view("uint32")
    for token in token_ids:
        bit = 1 << token % 32
        words[token // 32] = (int(words[token // 32]) | bit) if is_set else (int(words[token // 32]) & ~bit)
