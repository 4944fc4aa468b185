"""Answers that follow a grammar of the worker's, in vLLM's process of the engine, also where they go on.

vLLM makes masks and asks for a matcher of each request. What it would make itself begins anew with an answer that goes
on, and has none of the limits under which the gateway took the grammar; here a matcher is llguidance's, as the worker's
own, and has read what was put out elsewhere. Needs none of vLLM's tokenizers.
"""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .words import NUM_OUTPUT, Guide, Tokenizer

if TYPE_CHECKING:
    import torch

TOKENIZER = "BLITZ_VLLM_TOKENIZER"
"""In the environment: ``Tokenizer`` as JSON."""
NUM_THREADS = 2
_MAX_KEPT = 64
"""Compiled grammars, whose automata their requests share."""


def tell(tokenizer: Tokenizer) -> None:
    """Those that this process starts."""
    os.environ[TOKENIZER] = msgspec.json.encode(tokenizer).decode()


def guided(params: dict[str, Any], guide: Guide) -> Any:
    """vLLM's parameters of a request that follows a grammar."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    class Guided(SamplingParams):
        def _validate_structured_outputs(self, *_: object) -> None:
            """The worker has checked the grammar, and vLLM has no tokenizer here."""

    follows = StructuredOutputsParams(grammar=msgspec.json.encode(guide).decode())
    follows._backend = "guidance"
    return Guided(structured_outputs=follows, **params)


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


def _backend(told: Tokenizer, vocab_size: int, executor: ThreadPoolExecutor) -> Any:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

    class Matcher(StructuredOutputGrammar):
        """Of one request. Errors are final: only an end may follow, and that is then refused."""

        def __init__(self, matcher: Any, min_tokens: int) -> None:
            self._matcher = matcher
            self._min_tokens = min_tokens
            self._num_tokens = 0
            self._has_ended = False

        @property
        def _is_complete(self) -> bool:
            return bool(self._matcher.is_stopped() and not self._matcher.is_error())

        def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:  # noqa: ARG002 - vLLM's word
            for token in tokens:
                if self._has_ended:
                    return False
                if token in told.end_ids:
                    if self._matcher.is_error() or not (self._is_complete or self._matcher.is_accepting()):
                        return False
                    self._has_ended = True
                elif not 0 <= token < vocab_size or not self._matcher.consume_tokens([token]):
                    return False
                self._num_tokens += 1
            return True

        def validate_tokens(self, tokens: list[int]) -> list[int]:
            return tokens[: self._matcher.validate_tokens(tokens)]

        def rollback(self, num_tokens: int) -> None:
            back = num_tokens - self._has_ended
            self._has_ended = False
            self._num_tokens -= num_tokens
            if back > 0:
                self._matcher.rollback(back)

        def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
            row = bitmask[batch_index].numpy()
            if not self._is_complete and not self._matcher.is_error():
                self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                if self._num_tokens < self._min_tokens:
                    _set(row, told.end_ids, False)
                if not self._matcher.is_error() and row.any():
                    return
            row[:] = 0
            _set(row, told.end_ids, True)

        def is_terminated(self) -> bool:
            return self._has_ended

        def reset(self) -> None:
            self._matcher.reset()
            self._num_tokens, self._has_ended = 0, False

    class Backend(StructuredOutputBackend):
        def __init__(self) -> None:
            self._lock = threading.Lock()
            self._tokenizer: Any = None
            self._compiled: dict[str, Any] = {}

        def compile_grammar(self, request_type: object, grammar_spec: str, **_: object) -> Matcher:  # noqa: ARG002
            guide = msgspec.json.decode(grammar_spec, type=Guide)
            key = json.dumps([guide.text, guide.limits])
            with self._lock:
                if self._tokenizer is None:  # takes about a second for 128k tokens
                    text = Path(told.file).read_text(encoding="utf-8")
                    self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(told.end_ids))
                made = self._compiled.pop(key, None)
            if made is None or made.is_error():
                limits = LLParserLimits(**guide.limits, precompute_large_lexemes=False, verbose_errors=False)
                made = LLMatcher(self._tokenizer, guide.text, log_level=0, limits=limits)
                if made.is_error():
                    raise ValueError(made.get_error()[:500])
            with self._lock:
                self._compiled[key] = made
                while len(self._compiled) > _MAX_KEPT:
                    del self._compiled[next(iter(self._compiled))]
            return Matcher(made.deep_copy(), guide.min_tokens)

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
