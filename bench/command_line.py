"""What the command lines of benchmarks share: where the result goes, what they say meanwhile, how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.console import Console, RenderableType

from compose.errors import StackError
from shared.errors import BadRequest, BlitzError

T = TypeVar("T")

INTERRUPTED = 130


class NotWritten(BlitzError):
    """A result that is there, and cannot be written."""

    code = "not_written"


GiveBack = Annotated[
    float,
    typer.Option(
        "--give-back",
        metavar="S",
        help="For how long an instance is kept that the load does not need; 0: twice what a load over an idle NIC "
        "takes.",
    ),
]
VllmPython = Annotated[
    str, typer.Option(envvar="BLITZ_VLLM_PYTHON", help="Interpreter of vLLM's environment.", show_default=False)
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")]


def chosen_of(param: str, given: str, names: Sequence[str]) -> tuple[str, ...]:
    """Names with commas between them. Raises ``BadRequest`` for none, and for another one."""
    chosen = tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    if not chosen or not set(chosen) <= set(names):
        raise BadRequest(f"{param} must be of {', '.join(names)}, not {given!r}", param=param)
    return chosen


def sizes_of(mb: str) -> tuple[int, ...]:
    """Sizes of models in 10^6 bytes, with commas between them. Raises ``BadRequest`` for less than 10."""
    sizes = tuple(int(size) for size in mb.split(",") if size.strip().isdecimal())
    if not sizes or min(sizes) < 10 or ",".join(map(str, sizes)) != mb.replace(" ", ""):
        raise BadRequest(f"sizes are numbers from 10 on, with commas between them, not {mb!r}", param="mb")
    return sizes


def check_vllm(python: str) -> None:
    """Raises ``BadRequest`` unless it is a program."""
    if not python or not os.access(python, os.X_OK):
        raise BadRequest("--python (BLITZ_VLLM_PYTHON) must name the interpreter of vLLM's environment", param="python")


def printable(text: str) -> str:
    """What a file says may hold what a terminal would obey: all but ends of lines is shown as it is written."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def say(line: str) -> None:
    """On stderr, at once."""
    print(printable(line), file=sys.stderr, flush=True)  # noqa: T201


def say_wrong(line: str) -> None:
    """On stderr, in red."""
    Console(stderr=True).print(printable(line), style="red", markup=False, soft_wrap=True)


def show(*what: RenderableType) -> None:
    """On stdout, a text as one line. Raises ``NotWritten``."""
    console = Console()
    with writing("standard output"):
        for one in what:
            console.print(one, markup=False, highlight=False, soft_wrap=isinstance(one, str))


def check_folder(json_file: Path | None) -> None:
    """Before anything is measured: raises ``BadRequest`` if the result could not be written."""
    if json_file is None:
        return
    folder = json_file.absolute().parent
    if not folder.is_dir():
        raise BadRequest(f"no such directory: {folder}", param="json")
    if json_file.is_dir():
        raise BadRequest(f"{json_file} is a directory", param="json")
    if not os.access(json_file if json_file.exists() else folder, os.W_OK):
        raise BadRequest(f"{json_file} cannot be written: no permission", param="json")


def write(json_file: Path | None, document: object) -> None:
    """The result, if it is wanted as a file. Raises ``NotWritten``."""
    if json_file is not None:
        with writing(json_file):
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")


@contextlib.contextmanager
def writing(file: Path | str) -> Iterator[None]:
    """What ``check_folder`` could not see: raises ``NotWritten`` for a disk that is full, or a folder that is gone."""
    try:
        yield
    except OSError as error:
        raise NotWritten(f"{file} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def usage() -> Iterator[None]:
    """Input that cannot be is wrong usage of the command line: exit code 2, with its options."""
    try:
        yield
    except BadRequest as error:
        raise typer.BadParameter(printable(error.message)) from error


@contextlib.contextmanager
def one_line(name: str, *expected: type[Exception]) -> Iterator[None]:
    """A failure that was foreseen, ``expected`` among them, is a line on stderr and exit code 1; an interruption is
    code 130."""
    foreseen: tuple[type[Exception], ...] = (BlitzError, StackError, *expected)
    try:
        yield
    except asyncio.CancelledError:
        say(f"{name}: interrupted; everything was taken down")
        raise typer.Exit(INTERRUPTED) from None
    except foreseen as error:
        say(f"{name}: {error}")
        raise typer.Exit(1) from error


@contextlib.contextmanager
def unfinished() -> Iterator[None]:
    """Ctrl-C before there is anything to show or to write is a line on stderr, and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted: nothing had finished")
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def red_line() -> Iterator[None]:
    """A failure that was foreseen is a red line on stderr, and exit code 2 if the input is to blame, else 1."""
    try:
        yield
    except (BlitzError, StackError) as error:
        say_wrong(f"error: {error}")
        raise typer.Exit(2 if isinstance(error, BadRequest) else 1) from error


async def until_signal(name: str, work: Callable[[Path], Awaitable[T]]) -> T:
    """Run ``work`` with a temporary folder. Raises ``CancelledError`` after SIGINT, SIGTERM or SIGHUP, once everything
    is down."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    with tempfile.TemporaryDirectory(prefix=f"blitzscale-{name}-") as folder:
        return await work(Path(folder))
