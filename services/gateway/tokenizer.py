"""The tokenizers of the registered models, from the files of their checkpoint directories: loaded in a thread when a
model becomes known, while half of their memory is free, else on first use.

Loads run one at a time: the library holds the interpreter while it reads a file (about 25 ms per MB), so two at once
would only stall the event loop for longer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.gateway.chat_template import ChatTemplate
from services.gateway.core.text_output import ByteDetokenizer, Detokenizer, WindowDetokenizer
from shared.aio import Wakeup
from shared.checkpoint import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    check_file,
    parse_json,
    read_file,
)
from shared.errors import BadCheckpoint, BadRequest, BlitzError
from shared.messages.registry import FileDigest, ModelRecord

_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBES = 200
BYTES_PER_FILE_BYTE = 8
_REPLACEMENT_BYTES = 3
"""Of U+FFFD, which takes the place of a byte that is no text."""


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins of the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def _token_bytes(token: str) -> bytes:
    table = _byte_of_character()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_table(tokenizer: Tokenizer) -> list[bytes] | None:
    """The bytes of every token, or None unless joining them is exactly what the tokenizer's decoder does."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        return None
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = _token_bytes(token)
    draw = random.Random(0)
    for _ in range(_PROBES):
        ids = [draw.randrange(len(table)) for _ in range(draw.randint(1, 12))]
        joined = b"".join(table[i] for i in ids).decode("utf-8", "replace")
        if joined != tokenizer.decode(ids, skip_special_tokens=False):
            return None
    return table


class ModelTokenizer:
    """Encoding, decoding and the chat template of one model. Thread-safe, immutable."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, tool_template: ChatTemplate | None = None
    ) -> None:
        """``tool_template``: for requests with tools, where it is another one."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.template = template
        self.tool_template = tool_template or template
        self._byte_table = _byte_table(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special_tokens = {i: str(token.content) for i, token in added.items() if token.special}
        self._special_ids = frozenset(self._special_tokens)

        self._written_bytes = _written_bytes(tokenizer)

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        """The ids of each text."""
        # encode_batch releases the interpreter lock, encode does not.
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [tuple(encoding.ids) for encoding in encodings]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The whole text of some ids."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh incremental decoder whose deltas add up to ``decode``."""
        hidden = self._special_ids if skip_special_tokens else frozenset()
        if self._byte_table is not None:
            return ByteDetokenizer(self._byte_table, hidden)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), hidden)

    def text_bytes(self, token_ids: Sequence[int]) -> int:
        """The most that the text of these takes."""
        written = self._written_bytes
        return sum(written[i] for i in token_ids if i < len(written))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary writes each of these; empty for ids that it does not have."""
        return [self._tokenizer.id_to_token(i) or "" for i in token_ids]

    def special_tokens(self, texts: Collection[str]) -> dict[int, str]:
        """Those of the texts that are special tokens, by id."""
        return {i: text for i, text in self._special_tokens.items() if text in texts}

    def token_ids(self, texts: Collection[str]) -> dict[str, int]:
        """Those of the texts that are one token each, by their text."""
        found = {text: self._tokenizer.token_to_id(text) for text in texts}
        return {text: token_id for text, token_id in found.items() if token_id is not None}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token alone stands for."""
        if self._byte_table is not None:
            return self._byte_table[token_id] if token_id < len(self._byte_table) else b""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("\u2581", " ").encode()


def _written_bytes(tokenizer: Tokenizer) -> array[int]:
    """Of each token as the vocabulary writes it: for bytes that are no letters more than the text has."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    written = array("I", bytes(4 * (max(vocabulary.values(), default=-1) + 1)))
    for token, token_id in vocabulary.items():
        written[token_id] = max(len(token.encode()), _REPLACEMENT_BYTES)
    return written


def _templates_in(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The template, and the one for requests with tools if that is another one."""
    value = config.get("chat_template")
    if not isinstance(value, list):
        return (value if isinstance(value, str) else None), None
    named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
    plain, with_tools = (found if isinstance(found := named.get(n), str) else None for n in ("default", "tool_use"))
    return plain, with_tools


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for key in _SPECIAL_TOKEN_KEYS:
        value = config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[key] = value
    return tokens


def load_tokenizer(folder: Path, registered: Sequence[FileDigest]) -> ModelTokenizer:
    """Read ``tokenizer.json``, ``tokenizer_config.json`` and the chat template.

    ``registered``: the files as they were when the model was added. Raises ``BadCheckpoint`` naming the file, and
    ``CheckpointChanged`` for one that is another by now.
    """

    paths = [folder / name for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, CHAT_TEMPLATE_FILE)]
    contents = [read_file(path) for path in paths]
    for path, content in zip(paths, contents, strict=True):
        check_file(registered, path, content)
    tokens, config_content, own_template = contents
    if tokens is None:
        raise BadCheckpoint(f"{paths[0]}: missing")
    try:
        tokenizer = Tokenizer.from_str(tokens.decode())
    except Exception as error:
        raise BadCheckpoint(f"{paths[0]}: not a tokenizer: {error}") from error
    config = parse_json(paths[1], config_content) if config_content is not None else {}
    try:
        sources = (own_template.decode(), None) if own_template is not None else _templates_in(config)
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"{paths[2]}: {error}") from error
    try:
        special = _special_tokens(config)
        templates = [ChatTemplate(source, special) if source is not None else None for source in sources]
    except BadRequest as error:
        raise BadCheckpoint(f"{folder}: {error.message}") from error
    return ModelTokenizer(tokenizer, *templates)


def tokenizer_bytes(folder: Path) -> int:
    """Roughly what a loaded tokenizer occupies: 7 times its file (measured with 128,000 tokens), at least 1 MiB.
    Raises ``BadCheckpoint``."""
    path = folder / TOKENIZER_FILE
    try:
        return max(BYTES_PER_FILE_BYTE * path.stat().st_size, 1024 * 1024)
    except OSError as error:
        raise BadCheckpoint(f"{path}: {error}") from error


log = logging.getLogger(__name__)

SWEEP_EVERY_S = 30.0

Key = tuple[str, str]
"""Path and hash of a checkpoint."""


@dataclass(slots=True)
class _Entry:
    load: asyncio.Task[tuple[ModelTokenizer, int]]
    used_s: float
    num_bytes: int = 0


class TokenizerStore:
    """Tokenizers by checkpoint. Concurrent callers share a load. Requests keep their tokenizer until they end."""

    def __init__(self, *, max_bytes: int, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._clock = clock
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        """The least recently used one first."""
        self._known: set[Key] = set()
        self._to_load: deque[ModelRecord] = deque()
        """Models that became known."""
        self._came = Wakeup()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @property
    def num_bytes(self) -> int:
        """Of all that are loaded, by estimate."""
        return sum(entry.num_bytes for entry in list(self._entries.values()))

    def __len__(self) -> int:
        """Tokenizers loaded or being loaded."""
        return len(self._entries)

    def follow(self, records: Iterable[ModelRecord]) -> None:
        """These are the models: tokenizers of others are dropped, and ``run`` loads those of new ones."""
        wanted = {_key(record): record for record in records}
        for key in self._entries.keys() - wanted.keys():
            self._drop(key)
        self._to_load = deque(record for record in self._to_load if _key(record) in wanted)
        self._to_load.extend(record for key, record in wanted.items() if key not in self._known)
        self._known = set(wanted)
        self._came.fire()

    async def get(self, record: ModelRecord) -> ModelTokenizer:
        """The tokenizer of a model. Raises ``BadCheckpoint``; a failed load is tried again by the next call."""
        entry = self._entry(record)
        tokenizer, _ = entry.load.result() if entry.load.done() else await asyncio.shield(entry.load)
        return tokenizer

    def _entry(self, record: ModelRecord) -> _Entry:
        key = _key(record)
        entry = self._entries.get(key)
        if entry is None or (entry.load.done() and (entry.load.cancelled() or entry.load.exception() is not None)):
            entry = self._entries[key] = _Entry(self._start(key, record.files), self._clock())
        entry.used_s = self._clock()
        self._entries.move_to_end(key)
        return entry

    def sweep(self) -> None:
        """Drop those that have not been used for long, until half of the memory is free."""
        now_s, num_bytes = self._clock(), self.num_bytes
        for key, entry in list(self._entries.items()):
            if num_bytes <= self._max_bytes // 2:
                return
            if entry.load.done() and now_s - entry.used_s >= self._idle_s:
                num_bytes -= entry.num_bytes
                self._drop(key)

    async def run(self) -> None:
        """Load those of models that become known, and sweep, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._load_ahead())
            tasks.create_task(self._sweep_forever())

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_EVERY_S, self._idle_s))
            self.sweep()

    async def _load_ahead(self) -> None:
        while True:
            while self._to_load and self.num_bytes < self._max_bytes // 2:
                began_s = self._clock()
                # Whatever comes of it: whoever asks for the model is told.
                await asyncio.wait({self._entry(self._to_load.popleft()).load})
                # A load holds the interpreter: requests get as much of the time.
                await asyncio.sleep(self._clock() - began_s)
            self._to_load.clear()
            await self._came.until(lambda: bool(self._to_load))

    async def close(self) -> None:
        """Cancel loads in progress."""
        loads = [entry.load for entry in self._entries.values()]
        self._entries.clear()
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _start(self, key: Key, files: Sequence[FileDigest]) -> asyncio.Task[tuple[ModelTokenizer, int]]:
        task = asyncio.create_task(self._load(key, files), name=f"tokenizer {key[0]}")
        task.add_done_callback(_log_failure)
        return task

    async def _load(self, key: Key, files: Sequence[FileDigest]) -> tuple[ModelTokenizer, int]:
        folder = Path(key[0])
        loaded = await asyncio.get_running_loop().run_in_executor(
            self._loader, lambda: (load_tokenizer(folder, files), tokenizer_bytes(folder))
        )
        entry = self._entries.get(key)
        if entry is not None and entry.load is asyncio.current_task():
            entry.num_bytes = loaded[1]
            self._evict_for(key)
        return loaded

    def _evict_for(self, keep: Key) -> None:
        for key in [key for key, entry in self._entries.items() if entry.load.done() and key != keep]:
            if self.num_bytes <= self._max_bytes:
                return
            self._drop(key)

    def _drop(self, key: Key) -> None:
        # A load that a caller still waits for is completed.
        del self._entries[key]


def _key(record: ModelRecord) -> Key:
    return record.path, record.model_hash


def _log_failure(task: asyncio.Task[tuple[ModelTokenizer, int]]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if isinstance(error, BlitzError):
        log.warning("cannot load a tokenizer: %s", error)
    elif error is not None:
        log.error("cannot load a tokenizer", exc_info=error)
