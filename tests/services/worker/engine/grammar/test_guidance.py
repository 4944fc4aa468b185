"""The torch engine's answers kept to a grammar, with the checkpoint's own tokenizer: valid, and the same wherever and
beside whatever they are computed."""

from __future__ import annotations

import json
import queue
import re
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import pytest
from jsonschema import validate
from msgspec import structs
from tokenizers import Tokenizer

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.grammar.compiler import GrammarCompiler
from services.worker.engine.grammar.guidance import GrammarGuides, compiler_of
from services.worker.engine.grammar.matcher import GrammarMatcher
from services.worker.engine.loop import EngineLoop
from shared.checkpoint import inspect_checkpoint
from shared.errors import Unavailable
from shared.messages.generation import Grammar, SamplingParams, StreamPart
from shared.messages.registry import ModelRecord
from tests.checkpoints import tiny_checkpoint
from tests.services.worker.engine.harness import loaded_engine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
DATE = Grammar(kind="regex", text="[0-9]{4}-[0-9]{2}")


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoint("llama") / "tokenizer.json"))


def text_of(token_ids: Iterable[int]) -> str:
    return str(tokenizer().decode(list(token_ids), skip_special_tokens=True))


@lru_cache(maxsize=1)
def record() -> ModelRecord:
    checkpoint = inspect_checkpoint(tiny_checkpoint("llama"), with_hash=False)
    return ModelRecord(
        name="m",
        path=str(tiny_checkpoint("llama")),
        model_hash="h",
        layout_hash=checkpoint.layout.hash,
        spec=checkpoint.spec,
        weights_bytes=1,
        added_at_s=0.0,
        files=checkpoint.files,
    )


@lru_cache(maxsize=1)
def compiler() -> GrammarCompiler:
    return compiler_of(record())


class Engine:
    """A loop whose thread the test is."""

    def __init__(self, *, num_blocks: int = 160, **limits: int) -> None:
        config = SchedulerConfig(num_blocks=num_blocks, block_size=16, **limits)
        self.loop = EngineLoop(loaded_engine("llama", num_blocks=num_blocks), config, time.monotonic)
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.loop.scheduler.table.guide = GrammarGuides(compiler, lambda: self.woken.put(None)).guide
        self.parts: dict[str, list[StreamPart]] = {}

    def run(self, *requests: ActiveSequence) -> dict[str, list[int]]:
        for one in requests:
            self.loop.add(one)
        while self.loop.has_work:
            output = self.loop.step()
            if output is None:
                self.woken.get(timeout=30)
                continue
            for part in output.outputs:
                self.parts.setdefault(part.request_id, []).append(part)
        self.loop.scheduler.check()
        return {name: [i for part in parts for i in part.token_ids] for name, parts in self.parts.items()}

    def end(self, name: str) -> tuple[str | None, str]:
        last = self.parts[name][-1]
        return last.finish_reason, last.error.message if last.error is not None else ""


def request(
    name: str, grammar: Grammar | None = JSON, *, output: Sequence[int] = (), **changes: object
) -> ActiveSequence:
    values: dict[str, object] = {"max_tokens": 400, "seed": sum(map(ord, name)), "temperature": 1.0} | changes
    return ActiveSequence(
        request_id=name,
        attempt=0,
        gateway_id="g",
        prompt=tuple(3 + i % 200 for i in range(20)),
        params=SamplingParams(**values, grammar=grammar),  # type: ignore[arg-type]
        eos_token_ids=record().spec.eos_token_ids,
        output=list(output),
    )


@lru_cache(maxsize=1)
def alone() -> dict[str, list[int]]:
    """What each of some requests gets by itself."""
    return {f"r{n}": Engine().run(request(f"r{n}"))[f"r{n}"] for n in range(4)}


def test_answers_are_valid_and_end_when_they_are_complete() -> None:
    for token_ids in alone().values():
        assert len(token_ids) < 400
        validate(json.loads(text_of(token_ids)), SCHEMA)


def test_they_are_the_same_beside_others_with_and_without() -> None:
    engine = Engine()
    others = [request(f"o{n}", None, max_tokens=30, ignore_eos=True) for n in range(4)]
    dates = [request(f"d{n}", DATE) for n in range(3)]
    got = engine.run(*others, *(request(name) for name in alone()), *dates)
    assert {name: got[name] for name in alone()} == alone()
    assert all(re.fullmatch(DATE.text, text_of(got[f"d{n}"])) for n in range(3))
    assert {engine.end(name)[0] for name in alone()} == {"stop"}


def test_they_are_the_same_when_they_are_preempted() -> None:
    engine = Engine(num_blocks=18, max_num_sequences=8)
    assert engine.run(*(request(name) for name in alone())) == alone()
    assert engine.loop.scheduler.table.preemptions_total > 0


@pytest.mark.parametrize("cut", [1, 2, 7, 15, -1])
def test_another_attempt_goes_on_behind_what_was_put_out(cut: int) -> None:
    for name, whole in list(alone().items())[:2]:
        assert whole[:cut] + Engine().run(request(name, output=whole[:cut])).get(name, []) == whole


def test_an_attempt_behind_a_complete_answer_ends_without_a_token() -> None:
    engine = Engine()
    assert engine.run(request("r1", output=alone()["r1"])) == {"r1": []}
    assert engine.end("r1") == ("stop", "")


def test_min_tokens_and_ignore_eos_do_not_keep_a_complete_grammar_open() -> None:
    engine = Engine()
    got = engine.run(
        request("least", DATE, min_tokens=50),
        request("open", DATE, ignore_eos=True),
        request("greedy", DATE, temperature=0.0, repetition_penalty=1.3, logprobs=2),
    )
    assert all(re.fullmatch(DATE.text, text_of(token_ids)) for token_ids in got.values())
    assert {engine.end(name)[0] for name in got} == {"stop"}


def test_a_grammar_that_fails_ends_its_request_alone() -> None:
    engine = Engine()
    got = engine.run(request("bad", Grammar(kind="lark", text="start: nothing")), request("r1"))
    assert got["r1"] == alone()["r1"]
    assert engine.end("bad")[0] == "error"
    assert "grammar" in engine.end("bad")[1]


def test_masks_that_come_late_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = GrammarMatcher.mask

    def slowly(self: GrammarMatcher, out: object) -> None:
        time.sleep(0.01)
        mask(self, out)  # type: ignore[arg-type]

    monkeypatch.setattr(GrammarMatcher, "mask", slowly)
    engine = Engine()
    got = engine.run(
        *(request(name) for name in ("r1", "r2", "r3")), request("o", None, max_tokens=60, ignore_eos=True)
    )
    assert all(got[name] == alone()[name] for name in ("r1", "r2", "r3"))


def test_the_replay_is_what_makes_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = alone()["r1"]
    monkeypatch.setattr(GrammarMatcher, "replay", lambda self, token_ids: None)
    assert whole[:7] + Engine().run(request("r1", output=whole[:7])).get("r1", []) != whole


def test_a_worker_that_lacks_the_tokenizer_says_so(tmp_path: Path) -> None:
    elsewhere = structs.replace(record(), path=str(tmp_path))
    with pytest.raises(Unavailable, match="tokenizer"):
        compiler_of(elsewhere)
    engine = Engine()
    engine.loop.scheduler.table.guide = GrammarGuides(
        lambda: compiler_of(elsewhere), lambda: engine.woken.put(None)
    ).guide
    engine.run(request("r1"))
    assert engine.parts["r1"][-1].error is not None
    assert engine.parts["r1"][-1].error.code == "unavailable"
