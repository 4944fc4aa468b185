"""Checkpoint directories: what is found in a good one, and how each kind of bad one is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.checkpoint import IDENTITY_FILES, hash_checkpoint, inspect_checkpoint, inspect_registered
from shared.errors import BadCheckpoint, CheckpointChanged
from shared.safetensors_header import MAX_HEADER_BYTES, read_header
from shared.unit_digests import DIGEST_DIGITS
from tests.checkpoints import KINDS, VOCAB_SIZE, tiny_checkpoint

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A good directory of one weight file that the test may damage."""
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "single"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A good directory of several shards that the test may damage."""
    return Path(shutil.copytree(tiny_checkpoint("llama", sharded=True), tmp_path / "sharded"))


def _edit_json(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(file.read_text())
    edit(value)
    file.write_text(json.dumps(value))


def _edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def _shard_of(path: Path, tensor: str) -> str:
    name: str = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"][tensor]
    return name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_every_tensor_of_the_layout_is_found_with_its_bytes(kind: str, is_sharded: bool) -> None:
    checkpoint = inspect_checkpoint(tiny_checkpoint(kind, sharded=is_sharded))
    assert (len(checkpoint.weight_files) > 1) == is_sharded
    assert checkpoint.num_bytes == checkpoint.layout.num_bytes
    for unit in checkpoint.layout.units:
        for part in (part for slot in unit.slots for part in slot.parts):
            entry = checkpoint.tensors[part.checkpoint_name]
            raw = entry.file.read_bytes()[entry.begin : entry.end]
            expected = load_file(entry.file)[part.checkpoint_name]
            assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32).view(part.shape), expected)


def test_tied_embeddings_need_no_head_and_ignore_one(tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("qwen2"), tmp_path / "tied"))
    assert "lm_head.weight" not in inspect_checkpoint(path).tensors
    _edit_weights(path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(1)}))
    assert "lm_head.weight" not in inspect_checkpoint(path).tensors


def test_the_hash_is_of_all_that_makes_the_model_and_of_nothing_else(single: Path) -> None:
    before = inspect_checkpoint(single)
    hashes = {before.model_hash}
    assert len(before.model_hash) == 64
    assert before == hash_checkpoint(inspect_checkpoint(single, with_hash=False))
    (single / "README.md").write_text("hello")
    assert inspect_checkpoint(single) == before
    _edit_json(single / "generation_config.json", lambda config: config.update(eos_token_id=[257, 3]))
    generation = inspect_checkpoint(single)
    assert generation.spec.eos_token_ids == (257, 3)
    hashes.add(generation.model_hash)
    new = ("chat_template.jinja", "hf_quant_config.json")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", *new):
        with (single / name).open("ab") as stream:
            stream.write(b"\n")
        hashes.add(inspect_checkpoint(single).model_hash)
    with (single / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        last = stream.read(1)[0]
        stream.seek(-1, 2)
        stream.write(bytes([last ^ 1]))
    changed = inspect_checkpoint(single)
    hashes.add(changed.model_hash)
    assert len(hashes) == 8
    assert [f.name for f in changed.files] == list(IDENTITY_FILES)
    pairs = zip(before.unit_digests, changed.unit_digests, strict=True)
    differ = {at // DIGEST_DIGITS for at, (one, other) in enumerate(pairs) if one != other}
    assert differ == {5}, "the norm is the file's last tensor"


def test_a_registered_checkpoint_whose_config_changed_is_refused_by_name(single: Path) -> None:
    files = inspect_checkpoint(single).files
    assert inspect_registered(single, files) == inspect_checkpoint(single, with_hash=False)
    (single / "generation_config.json").unlink()
    with pytest.raises(CheckpointChanged, match=r"generation_config\.json is not there any more"):
        inspect_registered(single, files)
    (single / "config.json").write_text("{}")
    with pytest.raises(CheckpointChanged, match=r"/config\.json has changed"):
        inspect_registered(single, files)
    without = tuple(file for file in files if file.name != "config.json")
    with pytest.raises(CheckpointChanged, match=r"/config\.json came later"):
        inspect_registered(single, without)


def test_without_hash_weights_are_not_read(single: Path) -> None:
    assert inspect_checkpoint(single, with_hash=False).model_hash == ""


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="no such directory"):
        inspect_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, "{", "[]", b"\xff\xfe"])
def test_a_missing_or_broken_json_file_is_named(single: Path, name: str, content: str | bytes | None) -> None:
    if content is None:
        (single / name).unlink()
    else:
        (single / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadCheckpoint, match=name):
        inspect_checkpoint(single)


def test_an_unknown_architecture_is_refused(single: Path) -> None:
    _edit_json(single / "config.json", lambda config: config.update(architectures=["GPT2LMHeadModel"]))
    with pytest.raises(BadCheckpoint, match=r"GPT2LMHeadModel.*LlamaForCausalLM"):
        inspect_checkpoint(single)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickle_is_refused_with_the_reason(single: Path, name: str) -> None:
    (single / "model.safetensors").rename(single / name)
    with pytest.raises(BadCheckpoint, match=rf"{name}.*refused because unpickling runs code"):
        inspect_checkpoint(single)


def test_a_directory_without_weights_is_refused(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"neither model\.safetensors nor"):
        inspect_checkpoint(single)


def test_a_missing_tensor_is_named(single: Path) -> None:
    _edit_weights(single, lambda tensors: tensors.__delitem__(Q_PROJ))
    with pytest.raises(BadCheckpoint, match=f"tensor {Q_PROJ} is missing"):
        inspect_checkpoint(single)


def test_a_wrong_shape_is_named_with_both_shapes(single: Path) -> None:
    _edit_weights(single, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 63)}))
    with pytest.raises(BadCheckpoint, match=rf"model\.safetensors: tensor {Q_PROJ}: shape \[64, 63\].*\[64, 64\]"):
        inspect_checkpoint(single)


def test_an_unsupported_dtype_is_named(single: Path) -> None:
    _edit_weights(single, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.float64)}))
    with pytest.raises(BadCheckpoint, match=f"{Q_PROJ}: dtype F64"):
        inspect_checkpoint(single)


@pytest.mark.parametrize("num_bytes", [0, 7, 100, 3000, -1])
def test_a_truncated_file_is_refused(single: Path, num_bytes: int) -> None:
    file = single / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:num_bytes])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: .*truncated"):
        inspect_checkpoint(single)


def _entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("garbage", "header is not valid"),
        ("[" * 100_000, "header is not valid"),
        ("[]", "JSON object, not list"),
        ('{"a": 1}', "tensor a: must be described"),
        ('{"a": {}, "a": {}}', "duplicate tensor or key 'a'"),
        ({"a": _entry(0, 16, dtype="F33")}, "tensor a: unknown dtype 'F33'"),
        ({"a": _entry(0, 16, shape=[-4])}, "tensor a: shape"),
        ({"a": _entry(0, 16, shape=[5])}, r"tensor a: 16 bytes cannot hold F32 \[5\]"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}}, "tensor a: data_offsets"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [True, 16]}}, "tensor a: data_offsets"),
        ({"a": {"dtype": "F32", "shape": [0], "data_offsets": [16, 0]}}, "tensor a: data ends at 0, before"),
        ({"a": _entry(0, 20)}, "tensor a: .*truncated"),
        ({"a": _entry(0, 12), "b": _entry(8, 16)}, "tensor b: .*overlaps"),
        ({"a": _entry(0, 4), "b": _entry(8, 16)}, "tensor b: .*hole"),
        ({"a": _entry(0, 12)}, "4 bytes after the last tensor"),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, header: str | dict[str, Any], message: str) -> None:
    raw = (header if isinstance(header, str) else json.dumps(header)).encode()
    file = tmp_path / "bad.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    with pytest.raises(BadCheckpoint, match=rf"bad\.safetensors: .*{message}"):
        read_header(file)


@pytest.mark.parametrize("shape", [[0] * 17, [1 << 63], [10**4000] * 3, [0] * 100_000])
def test_no_tensor_has_more_dimensions_or_rows_than_can_be(tmp_path: Path, shape: list[int]) -> None:
    raw = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(BadCheckpoint, match="shape must be") as refused:
        read_header(file)
    assert len(refused.value.message) < 500


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63])
def test_a_header_length_over_the_limit_is_refused_before_reading(tmp_path: Path, length: int) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + bytes(64))
    with pytest.raises(BadCheckpoint, match="over"):
        read_header(file)


def test_a_missing_shard_is_named_with_a_tensor_of_it(sharded: Path) -> None:
    shard = _shard_of(sharded, Q_PROJ)
    (sharded / shard).unlink()
    with pytest.raises(BadCheckpoint, match=rf"{shard}: shard is missing.*model\."):
        inspect_checkpoint(sharded)


def test_an_index_that_places_a_tensor_wrongly_is_refused(sharded: Path) -> None:
    other = _shard_of(sharded, "model.norm.weight")
    assert other != _shard_of(sharded, Q_PROJ)
    _edit_json(sharded / "model.safetensors.index.json", lambda index: index["weight_map"].update({Q_PROJ: other}))
    with pytest.raises(BadCheckpoint, match=f"{other}: tensor {Q_PROJ} is absent"):
        inspect_checkpoint(sharded)


def test_a_tensor_that_the_index_leaves_out_is_named(sharded: Path) -> None:
    _edit_json(sharded / "model.safetensors.index.json", lambda index: index["weight_map"].pop(Q_PROJ))
    with pytest.raises(BadCheckpoint, match=f"tensor {Q_PROJ} is missing"):
        inspect_checkpoint(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    shard = sharded / _shard_of(sharded, "model.norm.weight")
    save_file({**load_file(shard), Q_PROJ: torch.zeros(64, 64)}, shard)
    with pytest.raises(BadCheckpoint, match=f"duplicate tensor {Q_PROJ}"):
        inspect_checkpoint(sharded)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 7, "a\0.safetensors"]
)
def test_the_index_cannot_name_a_file_outside_of_the_directory(sharded: Path, name: object) -> None:
    shutil.copy(sharded / _shard_of(sharded, Q_PROJ), sharded.parent / "outside.safetensors")
    _edit_json(sharded / "model.safetensors.index.json", lambda index: index["weight_map"].update({Q_PROJ: name}))
    with pytest.raises(BadCheckpoint, match=f"{Q_PROJ}: .* is not the name of a file in the directory"):
        inspect_checkpoint(sharded)


def test_an_index_of_pickle_shards_is_refused(sharded: Path) -> None:
    _edit_json(sharded / "model.safetensors.index.json", lambda index: index["weight_map"].update({Q_PROJ: "a.bin"}))
    with pytest.raises(BadCheckpoint, match="pickle is refused"):
        inspect_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_weight_map_is_refused(sharded: Path, weight_map: object) -> None:
    _edit_json(sharded / "model.safetensors.index.json", lambda index: index.update(weight_map=weight_map))
    with pytest.raises(BadCheckpoint, match="weight_map"):
        inspect_checkpoint(sharded)


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 10**9, -1])
def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_refused_naming_the_token(single: Path, token_id: int) -> None:
    added = {"id": token_id, "content": "<|late|>", "special": True}
    _edit_json(single / "tokenizer.json", lambda tokenizer: tokenizer["added_tokens"].append(added))
    with pytest.raises(BadCheckpoint, match=rf"<\|late\|>.*has id {token_id}.*vocab_size of {VOCAB_SIZE}"):
        inspect_checkpoint(single)


def test_a_model_vocabulary_with_ids_beyond_the_embedding_is_refused(single: Path) -> None:
    _edit_json(single / "tokenizer.json", lambda t: t["model"]["vocab"].update({"x1": VOCAB_SIZE + 1, "x2": 10**6}))
    with pytest.raises(BadCheckpoint, match=r"'x2' has id 1000000.*2 tokens have no row"):
        inspect_checkpoint(single)


def test_unigram_pieces_count_by_their_place(single: Path) -> None:
    def unigram(pieces: int) -> Callable[[dict[str, Any]], None]:
        model = {"type": "Unigram", "vocab": [[f"p{i}", -1.0] for i in range(pieces)]}
        return lambda tokenizer: tokenizer.update(model=model, added_tokens=[])

    _edit_json(single / "tokenizer.json", unigram(VOCAB_SIZE))
    assert inspect_checkpoint(single).spec.vocab_size == VOCAB_SIZE
    _edit_json(single / "tokenizer.json", unigram(VOCAB_SIZE + 1))
    with pytest.raises(BadCheckpoint, match=f"has id {VOCAB_SIZE},"):
        inspect_checkpoint(single)


_FILES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["", *_FILES])
def test_what_the_file_system_refuses_is_said_by_name(
    single: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    _refuse(monkeypatch, single / name, code)
    with pytest.raises(BadCheckpoint, match=rf"{name}.*: {os.strerror(code)}"):
        inspect_checkpoint(single)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors"])
def test_a_sharded_checkpoint_that_cannot_be_looked_into_is_refused(
    sharded: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _refuse(monkeypatch, sharded / name, errno.EIO)
    with pytest.raises(BadCheckpoint, match=os.strerror(errno.EIO)):
        inspect_checkpoint(sharded)


def test_a_shards_name_that_is_too_long_is_refused(sharded: Path) -> None:
    long = "a" * 300 + ".safetensors"
    _edit_json(sharded / "model.safetensors.index.json", lambda index: index["weight_map"].update({Q_PROJ: long}))
    with pytest.raises(BadCheckpoint, match=os.strerror(errno.ENAMETOOLONG)):
        inspect_checkpoint(sharded)


@pytest.mark.parametrize(
    ("name", "said"), [("a" * 300, os.strerror(errno.ENAMETOOLONG)), ("a\0b", "no such directory")]
)
def test_a_path_that_cannot_be_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(BadCheckpoint, match=said):
        inspect_checkpoint(tmp_path / name)


def _refuse(monkeypatch: pytest.MonkeyPatch, path: Path, code: int) -> None:
    """As a file system does that a mount or its server has trouble with: this path alone cannot be looked at."""
    look = os.stat

    def refuse(looked: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if looked == path:
            raise OSError(code, os.strerror(code), str(path))
        return look(looked, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refuse)
