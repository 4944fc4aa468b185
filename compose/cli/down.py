"""``blitzscale down``: stop the stack of a state directory."""

from __future__ import annotations

import signal
import time
from typing import Annotated

import psutil
import typer

from compose import lock_holder
from compose.cli.options import Json, StateDirectory, print_json, state_directory
from compose.errors import StackError
from compose.lock_holder import LockHolder

_LOOK_S = 0.05


class StillRuns(StackError):
    """The stack has not ended in time."""


def down(
    state_dir: StateDirectory = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", min=0, help="Seconds to wait until it has stopped; it goes on stopping then."),
    ] = 120.0,
    kill: Annotated[bool, typer.Option("--kill", help="Kill everything at once; streams break off.")] = False,
    as_json: Json = False,
) -> None:
    """Stop what `blitzscale up` started, in order, as Ctrl-C does: streams finish first. A second call meanwhile kills
    everything at once. Exit status 1 where nothing runs."""
    folder = state_directory(state_dir)
    deadline_s = time.monotonic() + timeout_s
    with lock_holder.find(folder) as holder:
        if not as_json:
            typer.echo(f"{'killing' if kill else 'stopping'} the stack in {folder} (process {holder.pid})")
        if not _stopped(holder, deadline_s, kill=kill):
            raise StillRuns(f"process {holder.pid} has not stopped within {timeout_s:g} s: wait, or use --kill")
        if as_json:
            print_json({"state_dir": str(folder), "pid": holder.pid, "stopped": True})
        else:
            typer.echo("stopped")


def _stopped(holder: LockHolder, deadline_s: float, *, kill: bool) -> bool:
    if not kill:
        holder.signal(signal.SIGTERM)
        return holder.wait(max(0.0, deadline_s - time.monotonic()))
    # The kernel kills them with it, and each takes its time to go.
    family = holder.descendants()
    holder.signal(signal.SIGKILL)
    if not holder.wait(max(0.0, deadline_s - time.monotonic())):
        return False
    while any(_lives(process) for process in family):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LOOK_S)
    return True


def _lives(process: psutil.Process) -> bool:
    try:
        # Where nobody collects them, processes that have ended stay as zombies.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
