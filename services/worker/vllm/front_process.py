"""vLLM's process and its socket, from the worker's side."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from services.worker.vllm.blitz_vllm import words
from shared.errors import EngineBroken

log = logging.getLogger(__name__)

W = TypeVar("W", bound=msgspec.Struct)

LAST_LINES = 200
MAX_LINE_CHARACTERS = 400
MAX_UNSENT_BYTES = 256 << 20
"""Of a process that does not read."""
MAX_REASON_CHARACTERS = 500
GONE_S = 5.0
LEAVE_S = 2.0
"""From the end of its connection until it is killed, with all that it has started."""
FOLLOW_S = 1.0
"""What it has started ends with it (``die_with_parent``), and what of Python's cleans up behind a process sees that."""
_PREFIX, _OWNER = "blitz-vllm-", "owner"
"""Of a process's folder, and the file in it that its worker has locked for as long as it lives."""
LOGGED_S = 0.2
"""What was logged before a word, or the process's end, may be read after it."""
ANSWER_S = 5.0
"""Longest that a process which takes requests may take to say so."""
_OURS = {
    "VLLM_PLUGINS": "blitz",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # A pass may wait at a gate for as long as weights come: what hangs, the worker notices by itself.
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "86400",
    # vLLM would bind the threads of all engines of a host to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The other one, where Triton is, takes no logits processor of the kind that accounts for what was put out before.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
_NOT_THEIRS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "BLITZ_", "VLLM_CPU_KVCACHE_SPACE")
"""What these begin is not passed on: it has other packages, our passwords are none of vLLM's business, and a model's
arguments say how much memory its KV has."""
_ELSEWHERE = re.compile(r"cause above|\(above\)|the logs|root cause")
_CAUSE = re.compile(r"[\w.]*(?:Error|Exception)(?:: .+|$)")
_NO_CAUSE = ("initialization failed", "EngineDeadError", "EngineCore encountered an issue")
"""What its processes say when another one has failed, and has said why."""


def environment_of(threads: int, folder: Path) -> dict[str, str]:
    """Of a process of vLLM that computes with so many threads. ``folder``: where it leaves sockets and files."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_THEIRS)}
    return kept | _OURS | {"OMP_NUM_THREADS": str(threads), "TMPDIR": str(folder)}


def remove_leftovers() -> None:
    """Folders of processes whose worker was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            owner = os.open(folder / _OWNER, os.O_RDWR)
        except OSError:
            continue  # it is being made or removed, or somebody else's
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its worker lives
        finally:
            os.close(owner)


class FrontProcess:
    """Event loop only, but for ``join``."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._on_word: Callable[[words.ToWorker], None] = lambda _word: None
        self._on_end: Callable[[str], None] = lambda _why: None
        self.imported: words.Imported | None = None
        """What it said, once it had imported vLLM."""
        self.num_weights = 0
        """Sockets for weights that it was told of."""
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # 0700
        self._owner = self._own_folder()
        self.failure_is_final = False
        """It has said that no other one would start, either."""
        self._process: subprocess.Popen[bytes] | None = None
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._is_over = self._says_why = False
        """``_says_why``: it has failed to start, and its end tells nothing more."""
        self._loop = asyncio.get_running_loop()
        self.ended = threading.Event()
        """The process and all that it started are gone."""

    def _own_folder(self) -> int:
        """The descriptor of a lock that lasts as long as this process."""
        owner = os.open(new := self.folder / f"{_OWNER}.new", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(owner, fcntl.LOCK_EX)
        new.rename(self.folder / _OWNER)  # not there before it is locked
        return owner

    def _remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._owner)

    def attach(self, on_word: Callable[[words.ToWorker], None], on_end: Callable[[str], None]) -> None:
        """Who hears what it says from now on, and, once, that it has ended and why, unless it was ``close`` that ended
        it."""
        self._on_word, self._on_end = on_word, on_end

    @property
    def is_over(self) -> bool:
        """It has ended, or was told to."""
        return self._is_over or self.ended.is_set()

    async def start(self, *, threads: int) -> None:
        """Raises ``EngineBroken`` where there is no such interpreter. Nothing, once it was closed."""
        path = self.folder / "front.sock"
        server = await asyncio.start_unix_server(self._connected, path)
        if self._is_over:
            server.close()
            return
        self._server = server
        try:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once; the operator names it
                [self._python, "-m", "blitz_vllm", str(path), str(os.getpid())],
                env=environment_of(threads, self.folder),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self.close()
            raise EngineBroken(f"BLITZ_VLLM_PYTHON={self._python}: {error.strerror}") from error
        # Threads of their own: those of the default executor are few, and these take as long as the process lives.
        for work in (self._read_lines, self._wait):
            threading.Thread(target=work, name="vllm", daemon=True).start()

    def _read_lines(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip()[:MAX_LINE_CHARACTERS]
                self._lines.append(text)
                log.debug("vllm: %s", text)

    def _wait(self) -> None:
        """Until it has ended; then whatever it has started ends, too."""
        assert self._process is not None
        status, group = self._process.wait(), self._process.pid
        time.sleep(LOGGED_S)
        self._tell_over(f"vLLM's process ended with {status}: {self.last_words}")
        if not self._until_gone(group, FOLLOW_S):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            self._until_gone(group, GONE_S)
        self._remove_folder()
        self.ended.set()

    def _tell_over(self, why: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            self._loop.call_soon_threadsafe(self._over, why)

    def _until_gone(self, group: int, limit_s: float) -> bool:
        """What was killed takes a moment to give back its memory. False: it is still there."""
        deadline_s = time.monotonic() + limit_s
        try:
            while time.monotonic() < deadline_s:
                os.killpg(group, 0)
                time.sleep(0.01)
        except (ProcessLookupError, PermissionError):
            return True
        return False

    @property
    def pid(self) -> int | None:
        """Of the process, which leads a group of its own with all that it starts; None before it has started."""
        return None if self._process is None else self._process.pid

    def _with_cause(self, failed: words.Failed) -> words.Failed:
        """What it refers to, another of its processes has logged."""
        lines = list(self._lines)
        said = [(match[0], index) for index, line in enumerate(lines) if (match := _CAUSE.search(line)) is not None]
        causes = [(text, index) for text, index in said if not any(word in text for word in _NO_CAUSE)]
        cause, index = causes[-1] if causes else ("", 0)
        if cause and ": " not in cause:  # an assertion says nothing: what it asserts is in a line before
            code = ((line.partition("] ")[2] or line).strip() for line in reversed(lines[:index]))
            cause = f"{cause}: {next((text for text in code if text.strip('^~ ')), '')}"
        return msgspec.structs.replace(failed, reason=f"{failed.reason} {cause or self.last_words}")

    def _in_short(self, failed: words.Failed) -> words.Failed:
        """Some errors of vLLM list all that it can."""
        self.failure_is_final = failed.is_final
        reason = " ".join(failed.reason.split())
        if len(reason) > MAX_REASON_CHARACTERS:
            log.info("vLLM: %s", reason)
            reason = f"{reason[:MAX_REASON_CHARACTERS]} [...]"
        return msgspec.structs.replace(failed, reason=reason)

    @property
    def last_words(self) -> str:
        """The end of its log, in one line."""
        return " / ".join(list(self._lines)[-5:]) or "it said nothing"

    def _kill(self) -> None:
        """It alone: ``_wait`` sees to what it has started."""
        if self._process is not None:
            self._process.kill()

    def _over(self, why: str) -> None:
        if not self._is_over and not self._says_why:
            self.close()
            self._on_end(why)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            writer.close()
            return
        self._writer, has_started = writer, False
        try:
            while True:
                length = words.length_of(await reader.readexactly(words.LENGTH_BYTES))
                word = words.to_worker.decode(await reader.readexactly(length))
                if isinstance(word, words.Imported):
                    self.imported = word
                elif isinstance(word, words.Started):
                    has_started = True
                elif isinstance(word, words.Failed) and _ELSEWHERE.search(word.reason) is not None:
                    if not has_started:  # otherwise requests wait
                        self._says_why = True
                        await asyncio.sleep(LOGGED_S)
                    word = self._with_cause(word)
                if isinstance(word, words.Failed):
                    word = self._in_short(word)
                if not self._is_over:
                    self._on_word(word)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (ValueError, msgspec.MsgspecError) as error:
            log.error("vLLM's process says what cannot be read: %s", error)
        except Exception:  # a word that cannot be taken is as bad as one that cannot be read
            log.exception("a word of vLLM's process")
        # Without a connection it is of no use, whatever it does: ``_watch`` says that it has ended.
        self._kill_later()

    def _kill_later(self) -> None:
        timer = threading.Timer(LEAVE_S, self._kill)
        timer.daemon = True
        timer.start()

    def say(self, word: msgspec.Struct) -> None:
        """Nothing, once it has ended. Raises ``ValueError`` for what is too long."""
        writer = self._writer
        if writer is None or self._is_over:
            return
        writer.write(words.frame(word))
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.error("vLLM's process does not read what it is told")
            self._kill()

    async def answer(self, kind: type[W], timeout_s: float, word: msgspec.Struct | None = None) -> W:
        """What it says of this kind next, of itself or to ``word``. All else that it says meanwhile is lost: nobody is
        served. ``attach`` again behind it. Raises ``EngineBroken`` if it fails, ends, or says nothing for so long."""
        if self.is_over:
            raise EngineBroken(f"vLLM's process has ended: {self.last_words}")
        answered: asyncio.Future[W] = self._loop.create_future()

        def hear(said: words.ToWorker) -> None:
            if answered.done():
                return
            if isinstance(said, kind):
                answered.set_result(said)
            elif isinstance(said, words.Failed):
                answered.set_exception(EngineBroken(said.reason))

        def end(why: str) -> None:
            if not answered.done():
                answered.set_exception(EngineBroken(why))

        self.attach(hear, end)
        if word is not None:
            self.say(word)
        try:
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            raise EngineBroken(f"vLLM's process says nothing for {timeout_s:g} s: {self.last_words}") from None

    async def is_well(self) -> bool:
        """Whether it takes requests, still. ``attach`` again behind it."""
        try:
            await self.answer(words.Well, ANSWER_S, words.AskWell())
        except EngineBroken:
            return False
        return not self.is_over

    def close(self) -> None:
        """End it; does not wait."""
        self._is_over = True
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            self._writer.close()
        if self._process is None:
            if not self.ended.is_set():
                self._remove_folder()
            self.ended.set()
        elif not self.ended.is_set():
            self._kill_later()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end, and that of all that it has started; False if it is still there."""
        return self.ended.wait(timeout_s)
