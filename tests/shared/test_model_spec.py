"""What is read from ``config.json``, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from shared.errors import BadCheckpoint
from shared.model_spec import Llama3Rope, ModelSpec
from shared.models.families import BY_ARCHITECTURE, parse_config
from tests.checkpoints import KINDS, tiny_checkpoint

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


TRANSFORMERS = {"LlamaForCausalLM": LlamaConfig, "MistralForCausalLM": MistralConfig, "Qwen2ForCausalLM": Qwen2Config}


class Noted(dict[str, Any]):
    """An object of a config that notes which of its keys are read."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__({k: Noted(v) if isinstance(v, dict) else v for k, v in content.items()})
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)


def _full(architecture: str) -> dict[str, Any]:
    """A config with every key that transformers writes, none of which has its default where that matters."""
    given = {**LLAMA, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 77, "rms_norm_eps": 3e-5}
    given |= {"bos_token_id": 7, "eos_token_id": 9, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 5e5}}
    if architecture == "MistralForCausalLM":
        given["sliding_window"] = 13
    config: dict[str, Any] = TRANSFORMERS[architecture](**given).to_dict()
    return {**config, "architectures": [architecture]}


def _outcome(config: Mapping[str, Any]) -> ModelSpec | str:
    try:
        return parse_config(config)
    except BadCheckpoint as error:
        return error.message


def _keys(architecture: str) -> set[str]:
    """Those that are read of a config."""
    noted = Noted(_full(architecture))
    parse_config(noted)
    return noted.read - {"architectures"}


CASES = [(architecture, key) for architecture in BY_ARCHITECTURE for key in sorted(_keys(architecture))]
NO_DEFAULT = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
"""Whatever lacks one of these is no config that anybody wrote: it is refused."""
NUMERIC = [
    (architecture, key)
    for architecture, key in CASES
    if isinstance(_full(architecture).get(key), int | float) and not isinstance(_full(architecture)[key], bool)
]


@pytest.mark.parametrize(("architecture", "key"), CASES)
def test_a_key_that_is_missing_has_the_default_of_its_architecture(architecture: str, key: str) -> None:
    config = {k: v for k, v in _full(architecture).items() if k != key}
    if key in NO_DEFAULT:
        assert f"{key} must be" in str(_outcome(config))
        return
    known = {k: v for k, v in config.items() if k != "architectures"}
    by_transformers = {**TRANSFORMERS[architecture](**known).to_dict(), "architectures": [architecture]}
    assert _outcome(config) == _outcome(by_transformers)


NO_NUMBERS = [pytest.param(float(name), id=name) for name in ("nan", "inf")] + [pytest.param(10**400, id="10**400")]


@pytest.mark.parametrize("value", [*NO_NUMBERS, float("-inf"), -1])
@pytest.mark.parametrize(("architecture", "key"), NUMERIC)
def test_a_number_that_cannot_be_is_refused_by_key(architecture: str, key: str, value: float) -> None:
    with pytest.raises(BadCheckpoint, match=rf"config\.json: {key} "):
        parse_config({**_full(architecture), key: value})


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("key", [*(k for k, v in LLAMA3.items() if v != "llama3"), "rope_theta"])
def test_a_number_of_the_rotation_that_cannot_be_is_refused_by_key(key: str, value: float) -> None:
    with pytest.raises(BadCheckpoint, match=rf"config\.json: {key} "):
        parse_config({**LLAMA, "rope_parameters": {"rope_theta": 5e5, **LLAMA3, key: value}})


def test_a_generation_config_names_the_ends_where_the_config_does_not() -> None:
    assert parse_config(LLAMA).eos_token_ids == (2,)
    assert parse_config(LLAMA, {"eos_token_id": [5]}).eos_token_ids == (5,)
    assert parse_config({**LLAMA, "eos_token_id": None}).eos_token_ids == ()


def test_key_value_heads_that_are_null_are_as_many_as_heads() -> None:
    config = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_attention_heads": 16}
    assert parse_config({**config, "num_key_value_heads": None}).num_kv_heads == 16
    assert parse_config(config).num_kv_heads == 8


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_writes_is_understood(kind: str) -> None:
    spec = parse_config(json.loads((tiny_checkpoint(kind) / "config.json").read_text()))
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.dtype) == (4, 4, 2, "float32")
    assert spec.head_dim == (24 if kind == "mistral" else 16)
    assert spec.sliding_window == (24 if kind == "mistral" else None)
    assert spec.qkv_bias == spec.tied_embeddings == (kind == "qwen2")
    assert (spec.llama3_rope is not None) == (kind == "llama3_rope")
    assert spec.kv_bytes_per_token == 2 * 4 * 2 * spec.head_dim * 4


def test_defaults_of_a_sparse_config() -> None:
    spec = parse_config(LLAMA)
    assert (spec.num_kv_heads, spec.head_dim, spec.rope_theta, spec.rms_norm_eps) == (4, 16, 10_000.0, 1e-6)
    assert (spec.dtype, spec.tied_embeddings, spec.bos_token_id, spec.eos_token_ids) == ("float32", False, 1, (2,))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_llama3_rope_in_the_old_and_the_new_spelling(rope: dict[str, Any]) -> None:
    spec = parse_config({**LLAMA, **rope})
    assert spec.rope_theta == 5e5
    assert spec.llama3_rope == Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=128
    )


def test_generation_config_adds_ends_of_sequence() -> None:
    spec = parse_config({**LLAMA, "eos_token_id": 1}, {"eos_token_id": [1, 5]})
    assert spec.eos_token_ids == (1, 5)
    with pytest.raises(BadCheckpoint, match=r"^generation_config\.json: eos_token_id must be token ids, not 'x'"):
        parse_config(LLAMA, {"eos_token_id": "x"})


@pytest.mark.parametrize(
    ("window", "expected"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)]
)
def test_a_mistral_window_that_is_not_mentioned_is_transformers_default(
    window: dict[str, Any], expected: int | None
) -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert parse_config({**mistral, **window}).sliding_window == expected


def test_a_qwen2_window_that_is_switched_off_is_none() -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "sliding_window": 128}
    assert parse_config({**qwen, "use_sliding_window": False}).sliding_window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "architecture None"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True},
            "use_sliding_window",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantiz"),
        ({"attention_bias": True}, "attention_bias"),
        ({"torch_dtype": "float64"}, "dtype 'float64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is over"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"hidden_size": 66}, "hidden_size 66"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope type 'yarn'"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": "llama3"}, "rope_parameters must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_what_cannot_be_served_is_refused_by_key_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadCheckpoint, match=rf"config\.json: .*{message}"):
        parse_config({**LLAMA, **changes})
