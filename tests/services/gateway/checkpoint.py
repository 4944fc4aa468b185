"""A tiny checkpoint directory: a byte-level tokenizer, a chat template, a model record."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from shared.checkpoint import IDENTITY_FILES
from shared.messages.registry import FileDigest, ModelRecord
from shared.model_spec import ModelSpec

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BOS, EOS = 256, 257
VOCAB_SIZE = 300
CONTEXT_TOKENS = 256


def byte_tokenizer() -> Tokenizer:
    """Token ids 0..255 are the bytes of those values; 256 begins a text, 257 ends it."""
    alphabet = _alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def _alphabet() -> list[str]:
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_checkpoint(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """The files that the gateway reads."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def files_in(folder: Path) -> tuple[FileDigest, ...]:
    """What a record says of the files that are there."""
    found = [file for name in IDENTITY_FILES if (file := folder / name).is_file()]
    return tuple(FileDigest(name=file.name, sha256=sha256(file.read_bytes()).hexdigest()) for file in found)


def model_record(folder: Path, name: str = "tiny") -> ModelRecord:
    """A registered model whose tokenizer lies in ``folder``."""
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        bos_token_id=BOS,
        eos_token_ids=(EOS,),
    )
    return ModelRecord(
        name=name,
        path=str(folder),
        model_hash="hash",
        layout_hash="layout",
        spec=spec,
        weights_bytes=1000,
        added_at_s=1.0,
        files=files_in(folder),
    )
