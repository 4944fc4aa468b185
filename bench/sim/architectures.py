"""The models that are simulated, by their published ``config.json``. No weights are needed.

Sources: meta-llama/Meta-Llama-3-8B, mistralai/Mistral-Small-24B-Base-2501 and Qwen/Qwen2.5-72B on Hugging Face; only
the keys that decide about shapes are kept. Llama-3-8B's context ends at 8,192 tokens; its profiles go on to 16,384, and
are there those of Llama-3.1-8B, which has the same shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.model_spec import DTYPE_BYTES, ModelSpec

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "mistral-24b": {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
        "vocab_size": 131072,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "qwen2.5-72b": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "use_sliding_window": False,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}


def num_parameters(spec: ModelSpec) -> int:
    """Of a decoder-only transformer with gated MLPs, embeddings and head included."""
    hidden, q_width = spec.hidden_size, spec.num_heads * spec.head_dim
    kv_width = spec.num_kv_heads * spec.head_dim
    attention = 2 * hidden * q_width + 2 * hidden * kv_width
    if spec.qkv_bias:
        attention += q_width + 2 * kv_width
    layer = attention + 3 * hidden * spec.intermediate_size + 2 * hidden
    return spec.num_layers * layer + hidden + spec.vocab_size * hidden * (1 if spec.tied_embeddings else 2)


def weights_bytes(spec: ModelSpec) -> int:
    return num_parameters(spec) * DTYPE_BYTES[spec.dtype]
