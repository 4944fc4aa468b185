from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from bench.prefix.checkpoint import CONTEXT_TOKENS, make_checkpoint, printable_ids
from shared.checkpoint import inspect_checkpoint


def test_it_has_a_hundred_megabytes_and_only_tokens_of_one_character_are_likely(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    checkpoint = inspect_checkpoint(path)
    assert checkpoint.layout.num_bytes > 100_000_000
    assert checkpoint.spec.max_position == CONTEXT_TOKENS
    token_of = printable_ids(path)
    assert len(set(token_of.values())) == len(token_of) == 94
    head = load_file(path / "model.safetensors")["lm_head.weight"]
    assert head.dtype == torch.float32
    norms = head.norm(dim=1)
    others = [index for index in range(len(norms)) if index not in set(token_of.values())]
    assert norms[list(token_of.values())].min() > 10 * norms[others].max()
