"""A checkpoint whose model says what it was told to, for clients that want calls and objects: made on the spot.

Random weights call no function. These are none: a token's embedding says which one comes next, attention and MLP add
nothing, and each script is a chain of tokens that no other script has. Which script is said, the chat template decides,
by a word in the last message; everything else (prefill, KV, sampling, grammars, streaming) is as with a real model.

A grammar leads away from scripts, as it has forced text written in the tokenizer's own way: in bytes. Behind a byte the
model ends what it can: objects, strings, numbers, itself. So an answer is short whatever its schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from compose.demo_model import tensor_shapes
from tests.checkpoints import byte_alphabet

_BEGIN, _END = "<|begin|>", "<|end|>"
_HEAD_SIZE = 64
_SCRIPT = 80.0
"""The logit of the token that comes next in a script."""
_CLOSING = {_END: 40.0, "}": 30.0, "]": 30.0, '"': 20.0, ",": 10.0}
"""Those of tokens that end something; other bytes have 0."""
_NEVER = -40.0
"""That of blanks, which a grammar lets follow each other without end, and of pieces of scripts."""


def call(name: str, /, **arguments: object) -> str:
    """A call as Hermes' and Qwen's models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


DRAWING = {"name": "sketch", "shape": {"kind": "circle", "radius": 7}}
TEXTS = {"hello": "Hello! How can I help you?", "result": "It is sunny, 21 degrees."}
"""Without a word that is known; behind a function's result."""
OBJECTS = {"draw": json.dumps(DRAWING)}
"""By a word of the last message, without functions."""
CALLS = {
    "both": "I look.\n" + call("get_weather", city="Paris") + "\n" + call("get_weather", city="Oslo"),
    "weather": call("get_weather", city="Paris"),
    "draw": call("Drawing", **DRAWING),
    "shapes": call("Circle", kind="circle", radius=7) + "\n" + call("Square", kind="square", side=3),
}
"""By a word of the last message, with functions."""


def _start(kind: str, word: str) -> str:
    return f"<|{kind}:{word}|>"


def scripts() -> dict[str, str]:
    """What is said, by the special token that it begins behind."""
    kinds = {"text": TEXTS, "object": OBJECTS, "call": CALLS}
    return {_start(kind, word): said for kind, words in kinds.items() for word, said in words.items()}


def chat_template() -> str:
    """Qwen's, in short; its last token begins a script. A system's message may have the word, too."""

    def choose(kind: str, words: Mapping[str, str]) -> str:
        tests = [f"{{%- elif '{word}' in asked %}}{_start(kind, word)}" for word in words]
        return (
            "".join(tests).replace("{%- elif", "{%- if", 1) + "{%- else %}" + _start("text", "hello") + "{%- endif %}"
        )

    return (
        "{{- bos_token }}"
        "{%- if tools %}system: # Tools\n{%- for tool in tools %}{{ tool | tojson }}\n{%- endfor %}"
        'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>\n{%- endif %}'
        "{%- for message in messages %}{{ message.role }}: {{ message.content }}"
        "{%- for made in message.tool_calls or [] %}<tool_call>{{ made.function | tojson }}</tool_call>{%- endfor %}"
        "{{ '\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}assistant: {%- set last = messages[-1] %}"
        "{%- set asked = last.content | lower %}"
        "{%- if last.role == 'tool' %}" + _start("text", "result") + "{%- elif tools %}" + choose("call", CALLS)
        + "{%- else %}" + choose("object", OBJECTS) + "{%- endif %}{%- endif %}"
    )  # fmt: skip


def pieces_of(said: str, taken: set[str]) -> list[str]:
    """The text in pieces of two characters or more, none of which is ``taken``; then they are."""
    pieces: list[str] = []
    begin = 0
    for end in range(2, len(said) + 1):
        piece = said[begin:end]
        if len(piece) > 1 and piece not in taken:
            pieces.append(piece)
            taken.add(piece)
            begin = end
    while begin < len(said):
        # What is left over is no piece of its own: it goes to the one before it.
        begin -= len(pieces.pop())
        if said[begin:] not in taken:
            pieces.append(said[begin:])
            taken.add(said[begin:])
            begin = len(said)
    return pieces


def write_scripted_model(folder: Path) -> Path:
    """Write the checkpoint, of about 20 MB."""
    folder.mkdir(parents=True)
    alphabet = byte_alphabet()
    vocabulary = {symbol: byte for byte, symbol in enumerate(alphabet)}
    special = [_BEGIN, _END, *scripts()]
    next_id: dict[int, int] = {}
    ids = {token: len(vocabulary) + number for number, token in enumerate(special)}
    vocabulary |= ids
    taken: set[str] = set()
    for start, said in scripts().items():
        last = ids[start]
        for piece in pieces_of(said, taken):
            symbols = "".join(alphabet[byte] for byte in piece.encode())
            next_id[last] = vocabulary[symbols] = len(vocabulary)
            last = next_id[last]
        next_id[last] = ids[_END]
    config = _config(len(vocabulary), ids)
    _write_tokenizer(folder, vocabulary, special)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, _usual(vocabulary), next_id), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _config(num_tokens: int, ids: Mapping[str, int]) -> dict[str, Any]:
    heads = -(-num_tokens // _HEAD_SIZE)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": num_tokens,
        "hidden_size": heads * _HEAD_SIZE,
        "intermediate_size": _HEAD_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": ids[_BEGIN],
        "eos_token_id": ids[_END],
        "torch_dtype": "float32",
    }


def _write_tokenizer(folder: Path, vocabulary: dict[str, int], special: list[str]) -> None:
    # Without merges: a prompt is bytes, and only the model writes pieces.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BEGIN,
        "eos_token": _END,
        "chat_template": chat_template(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _usual(vocabulary: Mapping[str, int]) -> np.ndarray[Any, Any]:
    """The logits behind a token of no script, by id."""
    logits = np.full(len(vocabulary), _NEVER, dtype=np.float32)
    logits[[byte for byte in range(256) if chr(byte) not in " \t\r\n"]] = 0.0
    for token, logit in _CLOSING.items():
        logits[vocabulary[token]] = logit
    return logits


def _weights(
    config: Mapping[str, Any], usual: np.ndarray[Any, Any], next_id: Mapping[int, int]
) -> dict[str, np.ndarray[Any, Any]]:
    """A token's hidden state is 1 in the place of its id, and so is what the normalization makes of it, times the root
    of the size; a column of the head has the logits behind a token."""
    tensors = {
        name: (np.ones if len(shape) == 1 else np.zeros)(shape, dtype=np.float32)
        for name, shape in tensor_shapes(config).items()
    }
    np.fill_diagonal(tensors["model.embed_tokens.weight"], 1.0)
    head = tensors["lm_head.weight"]
    head[:, : len(usual)] = usual[:, np.newaxis]
    for token_id, following in next_id.items():
        head[following, token_id] = _SCRIPT
    head /= config["hidden_size"] ** 0.5
    return tensors
