"""Every way in turn, round by round, each reading in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench import page_cache
from bench.loaders.child import READY, Answer
from bench.loaders.methods import METHODS, Method, PageCache
from bench.loaders.result import Reading, Result
from shared.checkpoint import Checkpoint, inspect_checkpoint
from shared.errors import Unavailable

_SLACK_S = 120.0
_SLOWEST_BYTES_PER_S = 20e6


class ReadingFailed(Unavailable):
    """A reader ended without an answer, or read other weights than the others."""

    code = "reading_failed"


def measure(
    path: Path,
    *,
    repetitions: int = 3,
    methods: Sequence[Method] = METHODS,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Read the checkpoint in ``path`` by every method. Raises ``BadCheckpoint``, ``ReadingFailed``, ``OSError``.

    Left out, with a reason: methods that are not installed, and cold readings where the page cache cannot be emptied.
    """
    checkpoint = inspect_checkpoint(path, with_hash=False)
    skipped = {method.name: reason for method in methods if (reason := method.missing)}
    readings: list[Reading] = []
    digests: dict[str, str] = {}
    dropped_by = ""
    for _ in range(repetitions):
        for method in methods:
            for state in method.states:
                key = f"{method.name}, {state}"
                if method.name in skipped or key in skipped:
                    continue
                try:
                    answer, dropped = read_once(checkpoint, method, state)
                except page_cache.CacheStays as error:
                    skipped[key] = error.message
                    say(f"{key}: left out, {error.message}")
                    continue
                dropped_by = dropped or dropped_by
                if answer.digest:
                    digests[method.name] = answer.digest
                    if len(set(digests.values())) > 1:
                        raise ReadingFailed(f"{', '.join(digests)} did not read the same weights: {digests}")
                readings.append(Reading(method.name, state, answer.seconds, answer.num_bytes))
                say(f"{key}: {answer.seconds:.3f} s")
    return Result(
        model_bytes=checkpoint.layout.num_bytes,
        num_files=len(checkpoint.weight_files),
        repetitions=repetitions,
        dropped_by=dropped_by,
        readings=tuple(readings),
        skipped=skipped,
    )


def read_once(checkpoint: Checkpoint, method: Method, state: PageCache) -> tuple[Answer, str]:
    """One reading, and how the page cache was emptied for it."""
    files = checkpoint.weight_files
    deadline_s = _SLACK_S + checkpoint.layout.num_bytes / _SLOWEST_BYTES_PER_S
    command = (sys.executable, "-m", "bench.loaders.child", method.name, str(checkpoint.path))
    with subprocess.Popen(
        command,
        env=os.environ | dict(method.env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        timer = threading.Timer(deadline_s, process.kill)
        timer.start()
        try:
            ready = process.stdout.readline().strip() if process.stdout else ""
            dropped_by = ""
            if ready == READY:
                # Only now: importing and allocating must not bring pages back, or wait for the disk later.
                if state == "cold":
                    dropped_by = page_cache.drop(files, everything=True)
                elif state == "warm":
                    page_cache.warm(files)
            answer, said = process.communicate("go\n" if ready == READY else None)
        finally:
            timer.cancel()
            process.kill()
    if process.returncode != 0:
        reason = (said.strip().splitlines() or [f"it was killed after {deadline_s:.0f} s"])[-1]
        raise ReadingFailed(f"{method.name} failed: {reason}")
    return msgspec.json.decode(answer.strip().splitlines()[-1], type=Answer), dropped_by
