from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer

from compose import demo_model
from shared.checkpoint import inspect_checkpoint


def test_the_demo_is_a_checkpoint_that_can_be_served(demo_model: Path) -> None:
    checkpoint = inspect_checkpoint(demo_model)
    assert checkpoint.spec.architecture == "LlamaForCausalLM"
    assert demo_model.name == "demo"
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == checkpoint.spec.vocab_size


def test_every_box_makes_the_same_weights(demo_model: Path, tmp_path: Path) -> None:
    again = demo_model_in(tmp_path)
    assert inspect_checkpoint(again).model_hash == inspect_checkpoint(demo_model).model_hash


def test_it_is_reused_when_it_is_there(tmp_path: Path) -> None:
    first = demo_model_in(tmp_path)
    (first / "model.safetensors").write_bytes(b"mine")
    assert (demo_model_in(tmp_path) / "model.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize("limit_bytes", [1_000, 100_000])
def test_a_disk_without_room_is_an_error_of_the_system(tmp_path: Path, limit_bytes: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            demo_model_in(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_a_half_made_one_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "model.safetensors").write_bytes(b"half")
    inspect_checkpoint(demo_model_in(tmp_path))


@pytest.mark.parametrize("text", ["Hello, world!\n\tok", "ü 世界 🚀", "<|role|> is special"])
def test_any_text_survives_the_tokenizer(demo_model: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_chat_template_renders_a_conversation(demo_model: Path) -> None:
    settings = json.loads((demo_model / "tokenizer_config.json").read_text())
    template = jinja2.Environment(autoescape=False).from_string(settings["chat_template"])
    messages = [{"role": "user", "content": "Hi"}]
    text = template.render(messages=messages, bos_token=settings["bos_token"], add_generation_prompt=True)
    assert text == "<|begin|><|role|>user\nHi<|turn|><|role|>assistant\n"
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert tokenizer.encode(text, add_special_tokens=False).ids[:2] == [0, 2]


def demo_model_in(folder: Path) -> Path:
    return demo_model.ensure_demo_model(folder)
