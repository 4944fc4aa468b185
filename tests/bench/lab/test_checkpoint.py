from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.lab.checkpoint import make_checkpoint
from shared.checkpoint import inspect_checkpoint


@pytest.mark.parametrize("num_files", [1, 3, 99])
def test_shards_hold_the_whole_model(tmp_path: Path, num_files: int) -> None:
    checkpoint = inspect_checkpoint(make_checkpoint(tmp_path, 16, num_files=num_files))
    # Two layers of nine tensors, the embedding, the final norm and the head.
    assert len(checkpoint.weight_files) == min(num_files, 21)
    assert checkpoint.layout.num_bytes == pytest.approx(17 << 20, rel=0.05)
    tensors = {name: t for file in checkpoint.weight_files for name, t in load_file(file).items()}
    assert tensors.keys() == checkpoint.tensors.keys()
    assert all(t.dtype == torch.bfloat16 and t.float().std() > 0.1 for t in tensors.values())
