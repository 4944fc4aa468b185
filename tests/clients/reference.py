"""``python -m tests.clients.reference MODEL_DIR``: what ``transformers`` makes of it, in the project's environment.

Reads an object of JSON: ``prompts`` to go on from, greedily, with ``max_tokens`` each, and ``pairs`` of a context and a
continuation. Writes ``texts`` and ``logprobs``, those of the continuations.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM


def _main(folder: Path) -> None:
    asked = json.load(sys.stdin)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    texts, logprobs = [], []
    with torch.inference_mode():
        for prompt in asked["prompts"]:
            ids = ids_of(prompt)
            made = model.generate(
                torch.tensor([ids]), max_new_tokens=asked["max_tokens"], do_sample=False, pad_token_id=0
            )
            texts.append(tokenizer.decode(made[0, len(ids) :].tolist()))
        for context, continuation in asked["pairs"]:
            ids, target = ids_of(context), ids_of(continuation)
            logits = model(torch.tensor([ids + target])).logits[0, len(ids) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(target)[:, None])
            logprobs.append(chosen.sum().item())
    sys.stdout.write(json.dumps({"texts": texts, "logprobs": logprobs}))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
