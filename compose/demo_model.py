"""A small Llama checkpoint with random weights, made on the spot: something to serve without a download.

The text it writes is noise; everything else (streaming, scaling, failover) is as with a real model.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.layout import layout_of
from shared.models.families import parse_config

NAME = "demo"
_SEED = 20250707
_NUM_SPECIAL = 4
_VOCAB_SIZE = _NUM_SPECIAL + 256
"""The special tokens and a token per byte: every id has a text."""
_HIDDEN_SIZE = 256
_INTERMEDIATE_SIZE = 768
NUM_LAYERS = 8
_NUM_HEADS = 8
_NUM_KV_HEADS = 4
_CONTEXT_TOKENS = 4096
_BOS, _EOS, _START, _END = "<|begin|>", "<|end_of_text|>", "<|role|>", "<|turn|>"
_SPECIAL = {token: index for index, token in enumerate((_BOS, _EOS, _START, _END))}

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|role|>{{ message['role'] }}\n{{ message['content'] }}<|turn|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)


def ensure_demo_model(folder: Path, name: str = NAME, *, num_layers: int = NUM_LAYERS, seed: int = _SEED) -> Path:
    """The demo checkpoint ``folder/demo``, made if it is not there. Deterministic; about 25 MB.

    ``name``: of the directory, for one with more layers, or with other weights of the same shapes. Needs ``numpy``,
    ``safetensors`` and ``tokenizers``. Made aside and moved into place, so that a directory that exists is whole.
    Raises ``OSError``.
    """
    target = folder / name
    if (target / "config.json").is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".demo-", dir=folder))
    try:
        printable = _write_tokenizer(made)
        config = demo_config() | {"num_hidden_layers": num_layers}
        _write_json(made / "config.json", config)
        _write_weights(made, config, printable, seed)
        made.chmod(0o755)
        (made / "model.safetensors").chmod(0o644)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(folder: Path) -> list[int]:
    """Gives the ids of printable ASCII."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = _SPECIAL | {letter: len(_SPECIAL) + index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BOS,
        "eos_token": _END,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": _CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    return [vocabulary[chr(code)] for code in range(0x21, 0x7F)] + [vocabulary["\u0120"]]


def demo_config() -> dict[str, Any]:
    """Its ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": _HIDDEN_SIZE,
        "intermediate_size": _INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": _NUM_HEADS,
        "num_key_value_heads": _NUM_KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": _CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": _SPECIAL[_BOS],
        "eos_token_id": [_SPECIAL[_END], _SPECIAL[_EOS]],
        "torch_dtype": "float32",
    }


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint with that ``config.json``, in the order in which checkpoints have them.

    Raises ``BadCheckpoint`` for a config of another architecture.
    """
    layout = layout_of(parse_config(config))
    units = (layout.embed, *layout.units[: layout.num_layers], layout.final)
    return {part.checkpoint_name: part.shape for unit in units for slot in unit.slots for part in slot.parts}


def _write_weights(folder: Path, config: Mapping[str, Any], printable: list[int], seed: int) -> None:
    import numpy as np
    from safetensors.numpy import save

    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = np.ones(shape, dtype=np.float32)
        else:
            # Scaled by fan-in, so that activations keep their size over the layers.
            tensors[name] = (random.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
    # Noise, but of printable letters: the others' logits stay near zero, these spread widely.
    spread = np.full((_VOCAB_SIZE, 1), 0.05, dtype=np.float32)
    spread[printable] = 2.0
    tensors["lm_head.weight"] *= spread
    # Unit size, so that what comes next depends on the last tokens and does not settle on one letter.
    tensors["model.embed_tokens.weight"] *= np.float32(np.sqrt(_HIDDEN_SIZE))
    # Written here, as safetensors and tokenizers have errors of their own for a full disk.
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
