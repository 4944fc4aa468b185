"""Wall clocks of single processes, ahead or behind, by libfaketime. Monotonic clocks are left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.chaos.injected_fault import now_s
from bench.chaos.plan import ClockStep
from shared.errors import BadRequest

_PLACES = ("/usr/lib", "/usr/local/lib", "/lib")
_LIBRARY = "libfaketimeMT.so.1"


def find_library() -> Path:
    """Raises ``BadRequest`` where it is not installed."""
    found = next((path for place in _PLACES for path in sorted(Path(place).rglob(_LIBRARY))), None)
    if found is None:
        raise BadRequest("--skew needs libfaketime (Debian: apt-get install libfaketime)", param="skew")
    return found


def clock_file(state_dir: Path, name: str) -> Path:
    """Where one process reads how far its clock is ahead."""
    return state_dir / f"clock-{name}"


def clock_env(file: Path) -> dict[str, str]:
    """By which a process that is not forked has a clock of its own."""
    return {
        "LD_PRELOAD": str(find_library()),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_CACHE_DURATION": "1",
    }


def set_clock(file: Path, ahead_s: float) -> None:
    """It counts within a second."""
    new = file.with_name(f"{file.name}.new")
    new.parent.mkdir(parents=True, exist_ok=True)
    new.write_text(f"{ahead_s:+g}s\n")
    new.rename(file)


async def step_clocks(
    steps: Sequence[ClockStep], state_dir: Path, *, start_s: float, say: Callable[[str], None]
) -> None:
    """Set each when it is due."""
    for step in steps:
        await asyncio.sleep(max(0.0, start_s + step.at_s - now_s()))
        set_clock(clock_file(state_dir, step.member), step.ahead_s)
        say(f"the clock of {step.member} is {step.ahead_s:+g} s")
