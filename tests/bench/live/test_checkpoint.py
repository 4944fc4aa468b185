from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from bench.live.checkpoint import make_checkpoint
from shared.checkpoint import inspect_checkpoint


def test_layers_are_of_one_size_and_the_rest_is_small(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(make_checkpoint(tmp_path, 3))
    *layers, embed, final = checkpoint.layout.units
    assert len({unit.num_bytes for unit in layers}) == 1
    assert len(layers) == checkpoint.layout.num_layers == 3
    assert 4_000_000 < layers[0].num_bytes < 4_300_000
    assert embed.num_bytes + final.num_bytes < layers[0].num_bytes / 4


def test_only_printable_tokens_are_likely(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 2)
    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    head = load_file(path / "model.safetensors")["lm_head.weight"]
    assert head.dtype == torch.float32
    norms = head.norm(dim=1)
    printable = [vocabulary[chr(code)] for code in range(0x21, 0x7F)]
    others = [index for index in range(len(norms)) if index not in printable]
    assert norms[printable].min() > 10 * norms[others].max()
