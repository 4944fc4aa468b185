"""Another checkpoint of the same shape, as if it had been trained on."""

from __future__ import annotations

import shutil
from pathlib import Path

_STRENGTH = 0.2
"""Of the noise, in standard deviations of a tensor."""


def make_tuned(model: Path, folder: Path, seed: int) -> Path:
    """A copy of the checkpoint in ``folder``, with noise on each of its matrices, which the seed decides. Needs torch
    and safetensors. Raises ``OSError``."""
    import torch
    from safetensors.torch import load_file, save_file

    made = folder / f"{model.name}-tuned-{seed}"
    shutil.copytree(model, made)
    random = torch.Generator().manual_seed(seed)
    for file in sorted(made.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() > 1 and tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=random)
                tensors[name] = (tensor + _STRENGTH * tensor.float().std() * noise).to(tensor.dtype)
        save_file(tensors, file, {"format": "pt"})
    return made
