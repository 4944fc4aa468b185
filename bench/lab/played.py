"""A model of the lab that plays a large one on a GPU: all bytes and links shrunk by one factor, times as they are.

The mock engine takes the times of the large model's profile. Weights, KV and activations are as much smaller as the
lab's links are slower than those of the paper's clusters, so whatever is moved takes as long as there. What the mock
can be told decides about the rest: it needs ``_KV_LAYER_BYTES`` of KV per token and layer, so that a model has
no more layers than its KV has room for (14 of Llama-3-8B's 32); its steps take as long all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.lab.checkpoint import EMBEDDED_TOKENS, write_checkpoint
from compose.demo_model import demo_config
from shared.checkpoint import inspect_checkpoint
from shared.model_spec import ModelSpec
from shared.models.families import parse_config
from shared.profile import Profile, program_version, write_profile

PAPER_NIC_GBPS = 100.0
"""Of a GPU of the paper's clusters (Table 1)."""
_GPU_BYTES, _USED_SHARE = 80e9, 0.9
"""Memory of an A100 or H100, and what of it weights and KV take."""
_KV_LAYER_BYTES = 24
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Played:
    """A model of the lab. Sizes in bytes; ``factor``: what they are smaller by."""

    name: str
    factor: float
    num_layers: int
    hidden_size: int
    head_dim: int
    intermediate_size: int
    kv_pool_bytes: int
    """Of an instance: what the GPUs have left beside the weights."""

    @classmethod
    def of(cls, profile: Profile, *, hidden_size: int, num_gpus: int, nic_gbps: float) -> Played:
        """``hidden_size``: of the large model. ``num_gpus``: of an instance, which is one worker with one link in the
        lab. ``nic_gbps``: what a transfer over that gets."""
        factor = PAPER_NIC_GBPS * num_gpus / nic_gbps
        kv_bytes = profile.kv_bytes_per_token / factor
        num_layers = max(1, min(profile.num_layers, round(kv_bytes / _KV_LAYER_BYTES)))
        # Keys and values of one head, whose halves rotate.
        head_dim = max(_KV_LAYER_BYTES // (2 * _BF16_BYTES), 2 * round(kv_bytes / num_layers / (4 * _BF16_BYTES)))
        hidden = max(4, round(hidden_size / factor))
        embedded = 2 * EMBEDDED_TOKENS * hidden
        layer = (profile.weights_bytes / factor / _BF16_BYTES - embedded) / num_layers
        attention = 4 * hidden * head_dim
        return cls(
            name=profile.model,
            factor=factor,
            num_layers=num_layers,
            hidden_size=hidden,
            head_dim=head_dim,
            intermediate_size=max(1, round((layer - attention - 2 * hidden) / (3 * hidden))),
            kv_pool_bytes=round((_GPU_BYTES * _USED_SHARE * num_gpus - profile.weights_bytes) / factor),
        )

    def shape(self, context_tokens: int) -> dict[str, Any]:
        """As ``config.json`` says it."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": self.head_dim,
            "max_position_embeddings": context_tokens,
            "torch_dtype": "bfloat16",
        }

    def spec(self, context_tokens: int) -> ModelSpec:
        """What its checkpoint is, without one."""
        return parse_config(demo_config() | self.shape(context_tokens))


@dataclass(frozen=True, slots=True)
class PlayedModel:
    """A checkpoint on disk, and the profile that the services read beside it."""

    checkpoint: Path
    profiles: Path
    weights_bytes: int
    kv_bytes_per_token: int


def make_played(played: Played, profile: Profile, folder: Path, *, context_tokens: int) -> PlayedModel:
    """Write checkpoint and profile. Raises ``OSError``."""
    path = write_checkpoint(folder / "models", played.name, played.shape(context_tokens))
    checkpoint = inspect_checkpoint(path)
    own = msgspec.structs.replace(
        profile,
        version=program_version(),
        model_hash=checkpoint.model_hash,
        layout_hash=checkpoint.layout.hash,
        engine="mock",
        num_layers=checkpoint.layout.num_layers,
        weights_bytes=checkpoint.layout.num_bytes,
        kv_bytes_per_token=checkpoint.spec.kv_bytes_per_token,
    )
    profiles = folder / "profiles"
    profiles.mkdir()
    write_profile(profiles / f"{played.name}.json", own)
    return PlayedModel(path, profiles, checkpoint.layout.num_bytes, checkpoint.spec.kv_bytes_per_token)
