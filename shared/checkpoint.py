"""A checkpoint directory as Hugging Face writes it: checked before anything is served from it.

``config.json``, ``tokenizer.json``, optionally ``generation_config.json``, and either
``model.safetensors`` or ``model.safetensors.index.json`` with its shards. Reads headers, never
unpickles, and imports no torch, so that the pool can refuse a bad checkpoint when it is added.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from shared.errors import BadCheckpoint, CheckpointChanged
from shared.generic_layout import generic_units, manifest_digest
from shared.layout import ArenaLayout, layout_of
from shared.messages.registry import FileDigest
from shared.model_spec import ALIGN_BYTES, ModelSpec
from shared.models.config_values import GENERATION_CONFIG_FILE
from shared.models.families import parse_config
from shared.models.generic import generic_spec
from shared.safetensors_header import WEIGHT_DTYPES, TensorEntry, read_header

__all__ = [
    "WEIGHT_DTYPES", "Checkpoint", "TensorEntry", "check_file", "hash_checkpoint", "inspect_checkpoint",
    "inspect_registered", "is_directory", "is_file", "parse_json", "read_file", "read_json",
]  # fmt: skip

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
QUANT_CONFIG_FILE = "hf_quant_config.json"
"""Which engines of others may read beside ``config.json``."""
CONFIG_FILES = (CONFIG_FILE, GENERATION_CONFIG_FILE)
IDENTITY_FILES = (*CONFIG_FILES, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, CHAT_TEMPLATE_FILE, QUANT_CONFIG_FILE)
"""What makes a model besides its weights."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_JSON_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that can be served."""

    path: Path
    layout: ArenaLayout
    """With the tensors of each unit."""
    tensors: Mapping[str, TensorEntry]
    """What the layout needs, by checkpoint name."""
    model_hash: str
    """Of all that makes the model (``hash_checkpoint``); empty if it was not asked for."""
    num_bytes: int
    """Bytes of the arena that holds the model (``layout.num_bytes``)."""
    files: tuple[FileDigest, ...]
    """``IDENTITY_FILES``, as far as they are there."""
    unit_digests: str = ""
    """As in ``ModelRecord``; empty if no hash was asked for."""

    @property
    def spec(self) -> ModelSpec:
        """Raises ``Conflict`` for a checkpoint with a generic layout."""
        return self.layout.spec

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """Files that hold needed tensors, in order of name."""
        return tuple(sorted({entry.file for entry in self.tensors.values()}))


def _stat(path: Path) -> os.stat_result | None:
    """What a path names; None for what is not there. Raises ``BadCheckpoint`` where that cannot be told."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
        return None
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read: {error.strerror}") from error


def is_file(path: Path) -> bool:
    """Whether a file is there. Raises ``BadCheckpoint`` where that cannot be told, unlike ``Path.is_file``."""
    found = _stat(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_directory(path: Path) -> bool:
    """Whether a directory is there. Raises ``BadCheckpoint`` where that cannot be told."""
    found = _stat(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def read_file(file: Path) -> bytes | None:
    """The content of one of a checkpoint's small files; None if it is not there. Raises ``BadCheckpoint`` naming it."""
    if not is_file(file):
        return None
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise BadCheckpoint(f"{file.name}: larger than {_MAX_JSON_BYTES} bytes")
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadCheckpoint(f"{file.name}: cannot be read: {error.strerror}") from error


def parse_json(file: Path, content: bytes | None) -> Mapping[str, Any]:
    """The object in a file of this content. Raises ``BadCheckpoint`` naming the file."""
    if content is None:
        raise BadCheckpoint(f"{file.name}: missing in {file.parent}")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{file.name}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{file.name}: must be a JSON object, not {type(value).__name__}")
    return value


def read_json(file: Path) -> Mapping[str, Any]:
    """The object in one of a checkpoint's files. Raises ``BadCheckpoint`` naming it."""
    return parse_json(file, read_file(file))


def check_file(registered: Iterable[FileDigest], file: Path, content: bytes | None) -> None:
    """Raises ``CheckpointChanged`` unless this is the file's content (None: it has none) that was registered."""
    was = next((known.sha256 for known in registered if known.name == file.name), None)
    if was != (_sha256(content) if content is not None else None):
        how = "is not there any more" if content is None else "came later" if was is None else "has changed"
        raise CheckpointChanged(f"{file} {how} since the model was registered: put it back, or register the model anew")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _no_weights(path: Path) -> BadCheckpoint:
    try:
        pickles = sorted(file.name for pattern in _PICKLE_PATTERNS for file in path.glob(pattern))
    except OSError as error:
        return BadCheckpoint(f"{path}: cannot be read: {error.strerror}")
    if pickles:
        return BadCheckpoint(
            f"{path}: weights only as pickle ({pickles[0]}), which is refused because unpickling runs code from the "
            f"file; convert them to {SINGLE_FILE}"
        )
    return BadCheckpoint(f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _shard_name(tensor: str, file_name: object) -> str:
    """A name of the index, checked to stay inside of the directory."""
    plain = isinstance(file_name, str) and file_name not in ("", ".", "..") and not set(file_name) & set("/\\\0")
    if not isinstance(file_name, str) or not plain:
        raise BadCheckpoint(f"{INDEX_FILE}: tensor {tensor}: {file_name!r} is not the name of a file in the directory")
    if not file_name.endswith(".safetensors"):
        raise BadCheckpoint(
            f"{INDEX_FILE}: tensor {tensor}: {file_name!r} is not a .safetensors file; pickle is refused because "
            "unpickling runs code from the file"
        )
    return file_name


def _sharded_tensors(path: Path) -> dict[str, TensorEntry]:
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{INDEX_FILE}: weight_map must be an object that names tensors, not {weight_map!r}")
    places = {tensor: _shard_name(tensor, name) for tensor, name in weight_map.items()}
    headers: dict[str, dict[str, TensorEntry]] = {}
    owners: dict[str, str] = {}
    for tensor, name in places.items():
        if name in headers:
            continue
        if not is_file(path / name):
            raise BadCheckpoint(f"{name}: shard is missing in {path}; {INDEX_FILE} places tensor {tensor} there")
        headers[name] = read_header(path / name)
        for held in headers[name]:
            if held in owners:
                raise BadCheckpoint(f"{name}: duplicate tensor {held}, also in {owners[held]}")
            owners[held] = name
    for tensor, name in places.items():
        if tensor not in headers[name]:
            raise BadCheckpoint(f"{name}: tensor {tensor} is absent, though {INDEX_FILE} places it there")
    return {tensor: headers[name][tensor] for tensor, name in places.items()}


def _needed_tensors(layout: ArenaLayout, found: Mapping[str, TensorEntry], source: str) -> dict[str, TensorEntry]:
    needed: dict[str, TensorEntry] = {}
    for part in (part for unit in layout.units for slot in unit.slots for part in slot.parts):
        name = part.checkpoint_name
        entry = found.get(name)
        if entry is None:
            raise BadCheckpoint(f"{source}: tensor {name} is missing")
        if entry.shape != part.shape:
            raise BadCheckpoint(
                f"{entry.file.name}: tensor {name}: shape {list(entry.shape)} where the config needs {list(part.shape)}"
            )
        if entry.dtype not in WEIGHT_DTYPES:
            raise BadCheckpoint(
                f"{entry.file.name}: tensor {name}: dtype {entry.dtype} is not supported ({', '.join(WEIGHT_DTYPES)})"
            )
        needed[name] = entry
    return needed


def _token_ids(tokenizer: Mapping[str, Any]) -> Iterator[tuple[int, object]]:
    """Ids and tokens of a ``tokenizer.json``, as far as they can be read."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        pairs: Iterable[tuple[object, object]] = ((token_id, token) for token, token_id in vocab.items())
    else:  # Unigram: pieces in the order of their ids
        pairs = enumerate(vocab) if isinstance(vocab, list) else ()
    added = tokenizer.get("added_tokens")
    entries = added if isinstance(added, list) else []
    more = ((entry.get("id"), entry.get("content")) for entry in entries if isinstance(entry, dict))
    return ((token_id, token) for token_id, token in chain(pairs, more) if isinstance(token_id, int))


def _check_tokenizer(tokenizer: Mapping[str, Any], vocab_size: int) -> None:
    """Every id must have a row in the embedding. Fewer ids than rows are common: vocabularies are padded."""
    beyond = [(token_id, token) for token_id, token in _token_ids(tokenizer) if not 0 <= token_id < vocab_size]
    if beyond:
        token_id, token = max(beyond, key=lambda pair: pair[0])
        raise BadCheckpoint(
            f"{TOKENIZER_FILE}: token {token!r} has id {token_id}, but {CONFIG_FILE} has a vocab_size of {vocab_size}: "
            f"{len(beyond)} tokens have no row in the embedding"
        )


def hash_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its hash and its digests.

    The hash is the SHA-256 (64 hex digits) over ``IDENTITY_FILES`` and the units as they lie in an arena. Reads every
    byte once, in parallel and without the interpreter's lock: seconds per 10 GB. Raises ``BadCheckpoint`` if a file
    cannot be read.
    """
    # Here: it needs numpy and xxhash, which those who only read a checkpoint's small files do not have.
    from shared.unit_digests import hash_units

    units = hash_units(checkpoint.layout, checkpoint.tensors)
    whole = hashlib.sha256()
    for file in checkpoint.files:
        whole.update(f"{file.name}\0{file.sha256}".encode())
    for unit in units:
        whole.update(unit.sha256)
    digests = "".join(unit.digest for unit in units)
    return replace(checkpoint, model_hash=whole.hexdigest(), unit_digests=digests)


def inspect_checkpoint(path: Path, *, with_hash: bool = True, generic: bool = False) -> Checkpoint:
    """Check a checkpoint directory and find its tensors.

    ``generic``: for an engine of others, which may know models that we do not (``shared.generic_layout``).
    ``with_hash=False`` leaves ``model_hash`` and ``unit_digests`` empty, and of the weights reads headers only. Raises
    ``BadCheckpoint`` naming file and tensor.
    """
    if not is_directory(path):
        raise BadCheckpoint(f"{path}: no such directory")
    contents = {name: read_file(path / name) for name in IDENTITY_FILES}
    config = parse_json(path / CONFIG_FILE, contents[CONFIG_FILE])
    generation = (
        parse_json(path / GENERATION_CONFIG_FILE, content)
        if (content := contents[GENERATION_CONFIG_FILE]) is not None
        else None
    )
    layout = None if generic else layout_of(parse_config(config, generation))
    if is_file(path / SINGLE_FILE):
        source, found = SINGLE_FILE, read_header(path / SINGLE_FILE)
    elif is_file(path / INDEX_FILE):
        source, found = INDEX_FILE, _sharded_tensors(path)
    else:
        raise _no_weights(path)
    if layout is None:
        tensors, layout = found, _generic_layout(config, generation or {}, found, source)
        if layout.of.vocab_size:
            parse_json(path / TOKENIZER_FILE, contents[TOKENIZER_FILE])
    else:
        tensors = _needed_tensors(layout, found, source)
        _check_tokenizer(parse_json(path / TOKENIZER_FILE, contents[TOKENIZER_FILE]), layout.spec.vocab_size)
    files = tuple(FileDigest(name=n, sha256=_sha256(content)) for n, content in contents.items() if content is not None)
    checkpoint = Checkpoint(path, layout, tensors, "", layout.num_bytes, files)
    return hash_checkpoint(checkpoint) if with_hash else checkpoint


def _generic_layout(
    config: Mapping[str, Any], generation: Mapping[str, Any], found: Mapping[str, TensorEntry], source: str
) -> ArenaLayout:
    if not found:
        raise BadCheckpoint(f"{source}: no tensors")
    try:
        units = generic_units(found)
        pages = [unit.num_bytes // ALIGN_BYTES for unit in units]
        embeddings = {slot.name: slot.shape for slot in units[1].slots}
        layout = layout_of(generic_spec(config, generation, pages, embeddings, manifest_digest(units)))
    except ValueError as error:
        raise BadCheckpoint(f"{CONFIG_FILE}: {error}") from error
    return replace(layout, units=units)


def inspect_registered(path: Path, files: Iterable[FileDigest], *, generic: bool = False) -> Checkpoint:
    """As ``inspect_checkpoint`` without hash, for a checkpoint that was registered with these files: what the layout
    follows from must be as it was. Raises ``CheckpointChanged`` besides."""
    known = tuple(files)
    if is_directory(path):
        for name in CONFIG_FILES:
            check_file(known, path / name, read_file(path / name))
    return inspect_checkpoint(path, with_hash=False, generic=generic)
