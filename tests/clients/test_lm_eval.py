"""lm-eval's ``local-completions``: what it finds is what ``transformers`` finds of the same checkpoint."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import lm_eval
import pytest
from datasets import Dataset

from tests.clients.conftest import PYTHON, ROOT
from tests.clients.names import RANDOM

MAX_TOKENS = 12
DOCS = [
    {"question": "What is blue?", "choices": [" The sky.", " Grass.", " Snow."], "answer": 0},
    {"question": "Two and two are", "choices": [" five.", " four.", " three."], "answer": 1},
    {"question": "abc", "choices": ["d", "efg", "hi"], "answer": 0},
]


def task(name: str, **config: Any) -> dict[str, Any]:
    """A task made on the spot."""
    return {
        "task": name,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(DOCS)},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        **config,
    }


CONTINUE = task(
    "continue",
    output_type="generate_until",
    doc_to_target="{{choices[answer]}}",
    generation_kwargs={"until": ["\u0000"], "max_gen_toks": MAX_TOKENS, "do_sample": False},
    metric_list=[{"metric": "exact_match"}],
)
CHOOSE = task(
    "choose",
    output_type="multiple_choice",
    target_delimiter="",
    doc_to_choice="{{choices}}",
    doc_to_target="{{answer}}",
    metric_list=[{"metric": "acc"}],
)


@pytest.fixture(scope="module")
def reference(served: Any) -> dict[str, Any]:
    """By ``transformers``."""
    asked = {
        "prompts": [doc["question"] for doc in DOCS],
        "max_tokens": MAX_TOKENS,
        "pairs": [[doc["question"], choice] for doc in DOCS for choice in doc["choices"]],
    }
    command = [PYTHON, "-m", "tests.clients.reference", served.models[RANDOM]]
    found = subprocess.run(command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    result: dict[str, Any] = json.loads(found.stdout)
    return result


def evaluate(served: Any, task: dict[str, Any]) -> list[Any]:
    """What was answered to each document."""
    arguments = {
        "model": RANDOM,
        "base_url": f"{served.openai_url}/completions",
        "tokenizer": served.models[RANDOM],
        "tokenizer_backend": "huggingface",
        "max_retries": 1,
    }
    found = lm_eval.simple_evaluate(
        model="local-completions", model_args=arguments, tasks=[task], bootstrap_iters=0, log_samples=True
    )
    samples = sorted(found["samples"][task["task"]], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def test_what_is_generated_is_what_transformers_generates(served: Any, reference: dict[str, Any]) -> None:
    assert [text for (text,) in evaluate(served, CONTINUE)] == reference["texts"]


def test_likelihoods_are_those_of_transformers(served: Any, reference: dict[str, Any]) -> None:
    found = [float(logprob) for choices in evaluate(served, CHOOSE) for logprob, _ in choices]
    assert found == pytest.approx(reference["logprobs"], abs=1e-3)
