"""Small checkpoints with random weights, and ``transformers`` as the reference of what is computed with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bench.gpu.engines import EnginePlace
from services.worker.memory.arena import Arena
from services.worker.memory.loader import load_unit
from shared.checkpoint import inspect_checkpoint
from shared.layout import ArenaLayout
from shared.model_spec import Dtype

Kind = Literal["llama", "mistral", "qwen2"]
KINDS: tuple[Kind, ...] = ("llama", "mistral", "qwen2")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Of all kinds. Mistral's heads are half as wide, and it sees ``window`` tokens."""

    hidden_size: int = 512
    intermediate_size: int = 1024
    num_layers: int = 4
    vocab_size: int = 1024
    head_dim: int = 128
    window: int = 48


def write_checkpoint(path: Path, kind: Kind, dtype: Dtype, size: ModelSize) -> Path:
    """A directory as it may be registered."""
    model = _model(kind, size)
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.5)
            elif "embed_tokens" in name:
                # Small, or a tied head would mostly repeat the last token.
                parameter.normal_(std=0.02)
            else:
                parameter.normal_(std=1.2 * parameter.shape[-1] ** -0.5)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")  # nobody tokenizes here
    return path


def _model(kind: Kind, size: ModelSize) -> Any:
    import transformers

    made: Any = transformers
    head_dim = size.head_dim // 2 if kind == "mistral" else size.head_dim
    common: dict[str, Any] = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.hidden_size // head_dim,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    if kind == "llama":
        config = made.LlamaConfig(**common, tie_word_embeddings=False)
        return made.LlamaForCausalLM(config)
    if kind == "mistral":
        own = {"head_dim": head_dim, "sliding_window": size.window, "tie_word_embeddings": False}
        return made.MistralForCausalLM(made.MistralConfig(**common, **own))
    return made.Qwen2ForCausalLM(made.Qwen2Config(**common, tie_word_embeddings=True))


def loaded_arena(path: Path, place: EnginePlace) -> tuple[ArenaLayout, Arena]:
    """As a worker reads it from disk."""
    checkpoint = inspect_checkpoint(path, with_hash=False)
    arena = Arena(place.device.allocate(checkpoint.layout.num_bytes))
    for unit in checkpoint.layout.units:
        load_unit(checkpoint, checkpoint.layout, unit, arena)
    return checkpoint.layout, arena


class Reference:
    """What ``transformers`` computes on the same device, prompt by prompt."""

    def __init__(self, path: Path, dtype: Dtype, place: EnginePlace) -> None:
        """``dtype``: to compute in, of weights as they are in the checkpoint."""
        from transformers import AutoModelForCausalLM

        # Of float32 exactly that: no TF32 in products.
        torch.set_float32_matmul_precision("highest")
        self._device = place.device.tensors.device
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        self._model = model.to(self._device).eval()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """``[len(tokens), vocab_size]`` float32, on the host."""
        ids = torch.tensor([list(tokens)], device=self._device)
        found: torch.Tensor = self._model(ids).logits[0].float().cpu()
        return found

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What it writes behind the prompt."""
        ids = torch.tensor([list(prompt)], device=self._device)
        generated = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [int(token) for token in generated[0, len(prompt) :]]
