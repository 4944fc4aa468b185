"""Checkpoints that change after they were registered."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from shared.checkpoint import Checkpoint
from shared.layout import Unit
from tests.checkpoints import build_model, tiny_checkpoint, write_tokenizer


def copy_of_tiny(folder: Path, *, sharded: bool = False) -> Path:
    """A checkpoint that the test may change."""
    return Path(shutil.copytree(tiny_checkpoint("llama", sharded=sharded), folder))


def write_wide(folder: Path, *, dtype: str = "float32", served: str = "float32") -> Path:
    """A checkpoint whose units have several blocks of checksums; ``served``: what its config says, ``dtype``: its
    files."""
    model = build_model("qwen2", hidden_size=256, intermediate_size=448, num_hidden_layers=2)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": served}))
    write_tokenizer(folder)
    return folder


def overwrite(path: Path) -> None:
    """Other weights of the same shapes in all files."""
    for file in path.glob("*.safetensors"):
        tensors = {name: tensor + 1 for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})


def flip_on_disk(checkpoint: Checkpoint, unit: Unit, draw: random.Random) -> Path:
    """Change one byte of a unit; the file that it is in."""
    part = draw.choice([part for slot in unit.slots for part in slot.parts])
    entry = checkpoint.tensors[part.checkpoint_name]
    with entry.file.open("r+b") as stream:
        stream.seek(draw.randrange(entry.begin, entry.end))
        was = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([was ^ 1 << draw.randrange(8)]))
    return entry.file
