"""From a request's bytes to streams that can be dispatched: decoded, checked, rendered, tokenized.

Everything is done once per request. Small requests are prepared on the event loop; large ones in a thread, in steps
that are short or release the interpreter.
"""

from __future__ import annotations

import hashlib
import json
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from msgspec import structs
from starlette.types import Receive, Scope

from services.gateway.core.call_output import AnswerParser, CallOutput
from services.gateway.core.routes import ModelRoutes
from services.gateway.core.scored_stream import ScoredStream
from services.gateway.core.stream import StreamState
from services.gateway.core.text_output import StopScanner, TextOutput
from services.gateway.core.thinking_output import ThinkingOutput
from services.gateway.core.thought_grammar import behind_thought
from services.gateway.core.thoughts import PlainText, Thinking, ThoughtParser
from services.gateway.core.tools.call_grammar import call_schema, calls_grammar, calls_or_answer
from services.gateway.core.tools.parser import ToolParser
from services.gateway.http import asgi
from services.gateway.http.endpoints.endpoint import Endpoint
from services.gateway.http.prompts import Prompt, PromptLimits, PromptMaker
from services.gateway.memory import MemoryClaim
from services.gateway.model_parsers import tool_parser_of
from services.gateway.request_bodies.body import read_body, required
from services.gateway.request_bodies.grammar_check import check_grammar
from services.gateway.request_bodies.guided import bounded_grammar, read_schema
from services.gateway.request_bodies.options import Options, SharedBody
from services.gateway.request_bodies.tools import ChatTools
from services.gateway.service import Gateway
from services.gateway.tokenizer import ModelTokenizer
from shared.errors import BadRequest, ContextLengthExceeded, UnsupportedParameter
from shared.messages.generation import MAX_PROMPT_LOGPROBS_BYTES, SamplingParams, prompt_logprobs_bytes

INLINE_BODY_BYTES = 32_768
"""Larger bodies are decoded in a thread."""
BYTES_PER_TOKEN = 40
"""A place in a tuple, and an integer."""
BYTES_PER_TOOLS = 32_768
"""What a stream in which functions may be called occupies beside: their names, and text that may become a call."""
BYTES_PER_STREAM = 8192
"""What a stream occupies beside its tokens: its state, its text, its tasks."""
SCOPE_DIGITS = 32
"""128 bits: no two keys have one scope."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that passed every check and is about to be dispatched."""

    response_id: str
    model: ModelRoutes
    context_tokens: int
    """The longest prompt plus output that may be asked for."""
    tokenizer: ModelTokenizer
    options: Options
    tool_parser: type[ToolParser] | None
    """What reads the calls; None: there may be none."""
    prompts: tuple[Prompt, ...]
    repeated: bytes
    """What the answer repeats of the request."""
    prompt_param: str
    """The parameter that the prompts came from."""
    length_param: str
    """The parameter that limits the output."""


async def read_request(gateway: Gateway, scope: Scope, receive: Receive, claim: MemoryClaim) -> bytes:
    """A request's body, within the gateway's limits. Raises what ``asgi.read_body`` does."""
    config = gateway.config
    return await asgi.read_body(
        scope,
        receive,
        max_bytes=config.max_body_bytes,
        timeout_s=config.read_timeout_s,
        claim=claim,
        offload=gateway.offload,
    )


def warm_up(endpoint: Endpoint) -> None:
    """Read such bodies: what reads them is made with the first one, for which it takes as long as anything else."""
    for raw in endpoint.examples:
        endpoint.read(raw, read_body(raw, endpoint.body_type), PromptLimits(vocab_size=1, max_bytes=len(raw)))


class Preparation:
    """One request's way to its dispatch. Both steps raise typed errors that name the parameter at fault."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint, raw: bytes) -> None:
        self._gateway, self._endpoint, self._raw = gateway, endpoint, raw

    async def read(self) -> tuple[SharedBody, ModelRoutes]:
        """The body, checked by itself, and the model that it names."""
        body = await self._run(lambda: read_body(self._raw, self._endpoint.body_type))
        return body, self._gateway.find_model(required(body.model, "model"))

    async def prepare(self, body: SharedBody, model: ModelRoutes) -> PreparedRequest:
        """The request for that model."""
        gateway, endpoint, record = self._gateway, self._endpoint, model.record
        limits = PromptLimits.of(record, gateway.bus.max_payload_bytes)
        request = await self._run(lambda: endpoint.read(self._raw, body, limits))
        options, grammar = request.options, request.options.sampling.grammar
        if grammar is not None:
            await gateway.offload.run(check_grammar, grammar, options.guide_param)
        tokenizer = await gateway.tokenizers.get(record)
        tool_parser = tool_parser_of(record, tokenizer) if options.tools is not None else None
        if options.tools is not None and options.tools.forced and tool_parser is not None:
            options = await gateway.offload.run(_forced_to_call, options, options.tools, tool_parser, tokenizer)
        elif options.tools is not None and grammar is not None and tool_parser is not None:
            options = await gateway.offload.run(_calls_or_answer, options, options.tools, tool_parser, tokenizer)
        prompts = await endpoint.prompts(request, PromptMaker(record, tokenizer, gateway.offload, limits))
        [first, *_] = prompts
        if first.thinking is not None and options.sampling.grammar is not None:
            options = await gateway.offload.run(_behind_thought, options, first.thinking, tokenizer)
        _refuse_large_scores(options, prompts)
        return PreparedRequest(
            endpoint.id_prefix + secrets.token_hex(16),
            model,
            gateway.dispatcher.context_tokens(model),
            tokenizer,
            options,
            tool_parser,
            tuple(prompts),
            request.repeated,
            endpoint.prompt_param,
            endpoint.length_param,
        )

    async def _run(self, step: Callable[[], T]) -> T:
        return step() if len(self._raw) <= INLINE_BODY_BYTES else await self._gateway.offload.run(step)


def _forced_to_call(options: Options, tools: ChatTools, kind: type[ToolParser], tokenizer: ModelTokenizer) -> Options:
    """With the grammar of calls as this model writes them."""
    schema = call_schema(tools.forced, kind.arguments_field)
    param = "tool_choice"
    check_grammar(bounded_grammar("json_schema", json.dumps(read_schema(schema, "tools")), "tools"), "tools")
    grammar = calls_grammar(
        kind, schema, tokenizer.token_ids(kind.marks), parallel=tools.parallel and not tools.is_named
    )
    if grammar is None:
        raise UnsupportedParameter(
            f"{param}: calls in the format of this model cannot be asked for (auto and none are supported)", param=param
        )
    grammar = bounded_grammar(grammar.kind, grammar.text, "tools")
    return replace(options, sampling=structs.replace(options.sampling, grammar=grammar), guide_param=param)


def _calls_or_answer(options: Options, tools: ChatTools, kind: type[ToolParser], tokenizer: ModelTokenizer) -> Options:
    """With the grammar of an answer by the schema, beside which functions may be called, with any arguments."""
    answer, param = options.sampling.grammar, options.guide_param
    assert answer is not None
    schema = call_schema({name: {"type": "object"} for name in sorted(tools.names)}, kind.arguments_field)
    calls = calls_grammar(kind, schema, tokenizer.token_ids(kind.marks), parallel=tools.parallel)
    if calls is None:
        raise UnsupportedParameter(
            f"{param}: together with tools in the format of this model it is not supported", param=param
        )
    grammar = calls_or_answer(calls, json.loads(answer.text))
    grammar = bounded_grammar(grammar.kind, grammar.text, param)
    return replace(options, sampling=structs.replace(options.sampling, grammar=grammar))


def _behind_thought(options: Options, thinking: Thinking, tokenizer: ModelTokenizer) -> Options:
    """Whose grammar begins behind the thought."""
    grammar = options.sampling.grammar
    assert grammar is not None
    if grammar.kind != "calls":
        # It may be too large so, if hardly. Of calls, which may have tokens of the model, the schemas were checked.
        check_grammar(behind_thought(grammar, thinking, {}), options.guide_param)
    marks = tokenizer.token_ids((thinking.format.begin, thinking.format.end))
    grammar = behind_thought(grammar, thinking, marks)
    return replace(options, sampling=structs.replace(options.sampling, grammar=grammar))


def _refuse_large_scores(options: Options, prompts: Sequence[Prompt]) -> None:
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    num_bytes = sum(
        prompt_logprobs_bytes(num_tokens, num_top)
        for number in range(options.n)
        if (num_top := _num_scores(options, number)) is not None
    )
    if num_bytes > MAX_PROMPT_LOGPROBS_BYTES:
        raise BadRequest(
            f"{options.scores_param}: log-probabilities of {num_tokens} tokens of prompts would take {num_bytes} "
            f"bytes, at most {MAX_PROMPT_LOGPROBS_BYTES} are allowed: 16 for each token and each alternative to it",
            param=options.scores_param,
        )


def _num_scores(options: Options, number: int) -> int | None:
    """Alternatives per token of the prompt that choice ``number`` has to bring. All choices list the first one's."""
    return options.sampling.prompt_logprobs if number == 0 else options.echo_logprobs


def memory_bytes(prepared: PreparedRequest) -> int:
    """What a request occupies from its admission to its end, apart from its output. Choices of one prompt share it."""
    beside = BYTES_PER_STREAM if prepared.options.tools is None else BYTES_PER_STREAM + BYTES_PER_TOOLS
    n = prepared.options.n
    streams = sum(n * beside + BYTES_PER_TOKEN * len(prompt.token_ids) for prompt in prepared.prompts)
    grammar = prepared.options.sampling.grammar
    return streams + len(prepared.repeated) + (len(grammar.text) if grammar is not None else 0)


def cache_scope_of(owner: str, salt: str) -> str:
    """Which requests may use each other's KV: those of one owner (``ApiKeys.owner_of_prefixes``), and of them those of
    one salt."""
    return hashlib.sha256(f"{owner}\0{salt}".encode(errors="surrogatepass")).hexdigest()[:SCOPE_DIGITS]


def streams_of(
    prepared: PreparedRequest,
    options: Options,
    *,
    key: str,
    arrived_at_s: float,
    seeds: random.Random,
    prefixes_of: str | None,
) -> list[StreamState]:
    """A stream in its queued state for each choice, all of one prompt in a row, to be generated with ``options``.

    ``prefixes_of``: whose earlier KV they may find, of models that have a prefix cache; None: nobody's.
    ``key``: the name of the caller's key; ``arrived_at_s``: Unix time; ``seeds`` draws for callers that gave none.
    Raises ``BadRequest`` for an empty prompt, ``ContextLengthExceeded`` when prompt and output do not fit.
    """
    record = prepared.model.record
    scope = ""
    if prefixes_of is not None and record.prefix_cache:
        scope = cache_scope_of(prefixes_of, options.cache_salt)
    eos = () if options.sampling.ignore_eos else record.basics.eos_token_ids
    end_token_ids = frozenset((*eos, *options.sampling.stop_token_ids))
    choices = [(prompt, number) for prompt in prepared.prompts for number in range(options.n)]
    return [
        (StreamState if _num_scores(options, number) is None else ScoredStream)(
            request_id=f"{prepared.response_id}-{index}",
            model=record.name,
            model_hash=record.model_hash,
            prompt_token_ids=prompt.token_ids,
            sampling=_sampling_of(prepared, options, len(prompt.token_ids), number, seeds),
            arrived_at_s=arrived_at_s,
            key=key,
            priority=options.priority,
            cache_scope=scope,
            prompt_cache_key=options.prompt_cache_key,
            default_max_tokens=options.max_tokens is None,
            end_token_ids=end_token_ids,
        )
        for index, (prompt, number) in enumerate(choices)
    ]


def _maximum(limit: int) -> str:
    """In OpenAI's and vLLM's words, by which clients tell this error from others."""
    return f"this model's maximum context length is {limit} tokens"


def _sampling_of(
    prepared: PreparedRequest, options: Options, num_prompt: int, number: int, seeds: random.Random
) -> SamplingParams:
    """Of choice ``number`` of a prompt."""
    limit = prepared.context_tokens
    if num_prompt == 0:
        raise BadRequest("the prompt has no tokens", param=prepared.prompt_param)
    if num_prompt >= limit:
        raise ContextLengthExceeded(
            f"{_maximum(limit)}; {num_prompt} of the prompt and at least one of output exceed it",
            param=prepared.prompt_param,
        )
    max_tokens = options.max_tokens
    if max_tokens is None:
        left = limit - num_prompt
        max_tokens = min(left, options.default_max_tokens) if options.default_max_tokens is not None else left
    if num_prompt + max_tokens > limit:
        raise ContextLengthExceeded(
            f"{_maximum(limit)}; {num_prompt} of the prompt and {max_tokens} of output exceed it",
            param=prepared.length_param,
        )
    least = options.sampling.min_tokens
    if least > max_tokens:
        raise BadRequest(f"min_tokens {least} is above the {max_tokens} possible", param="min_tokens")
    seed = options.seed + number if options.seed is not None else seeds.getrandbits(63)
    scores = _num_scores(options, number)
    return structs.replace(options.sampling, max_tokens=max_tokens, seed=seed % 2**63, prompt_logprobs=scores)


def text_output(prepared: PreparedRequest, prompt: Prompt, stream: StreamState) -> TextOutput:
    """The text side of a stream of that prompt: a ``CallOutput`` where functions may be called, a ``ThinkingOutput``
    where the model may think."""
    options, tokenizer = prepared.options, prepared.tokenizer
    detokenizer = tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens)
    scanner = StopScanner(options.stop, include=options.include_stop_string) if options.stop else None
    hidden_ids = frozenset[int]() if options.include_stop_string else stream.end_token_ids
    min_tokens = options.sampling.min_tokens
    tools, kind, thinking = options.tools, prepared.tool_parser, prompt.thinking
    if kind is None and thinking is None:
        return TextOutput(detokenizer, scanner=scanner, hidden_ids=hidden_ids, min_tokens=min_tokens)
    parser: AnswerParser = PlainText()
    texts: tuple[str, ...] = ()
    if kind is not None and tools is not None:
        parser, texts = kind(tools.names, partial(_call_id, kind), parallel=tools.parallel), kind.marks
    if thinking is not None:
        texts += thinking.format.begin, thinking.format.end
    # Special tokens that are shown come as text, and so do the parser's.
    marks = tokenizer.special_tokens(texts) if options.skip_special_tokens else {}
    if thinking is not None:
        thoughts = ThoughtParser(thinking, parser)
        return ThinkingOutput(
            detokenizer, thoughts, marks, scanner=scanner, hidden_ids=hidden_ids, min_tokens=min_tokens
        )
    return CallOutput(detokenizer, parser, marks, scanner=scanner, hidden_ids=hidden_ids, min_tokens=min_tokens)


def _call_id(kind: type[ToolParser]) -> str:
    return kind.id_prefix + "".join(secrets.choice(kind.id_alphabet) for _ in range(kind.id_length))
