"""``blitzscale up``: the whole system on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from compose import preflight
from compose.cli.options import EngineName, KeepAlive, Served, SloTbt, SloTtft, seconds, state_directory
from compose.config import API_KEY_VARIABLE, DEFAULT_PORT, StackConfig, default_state_dir, default_workers
from compose.demo_model import ensure_demo_model
from compose.detached import Launcher, launch
from compose.errors import StackRefused
from compose.log_lines import LOG_NAME, ConsoleSink, LineSink, worth_showing
from compose.stack import Stack
from shared.messages.admin import Status
from shared.messages.common import SERVED_BY


def up(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Checkpoint directories (Hugging Face layout); by default a demo.", metavar="[MODEL_DIR]..."
        ),
    ] = None,
    model: Annotated[
        list[Path] | None, typer.Option(help="The same as MODEL_DIR.", metavar="MODEL_DIR", show_default=False)
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Worker processes; 2, or 4 with eight cores or more; at least what the models need.",
            show_default=False,
        ),
    ] = None,
    planners: Annotated[int, typer.Option(help="Planner processes; one leads, the others wait.")] = 1,
    monitors: Annotated[int, typer.Option(help="Monitor processes; one leads, the others wait.")] = 1,
    pools: Annotated[int, typer.Option(help="Pool processes; one leads, the others wait.")] = 1,
    gateways: Annotated[int, typer.Option(help="Gateway processes; each has a port of its own.")] = 1,
    host: Annotated[str, typer.Option(help="Address on which the gateways listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="The gateway's port; 0 takes a free one. Further gateways take the next free ports.")
    ] = DEFAULT_PORT,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Logs, sockets, passwords, records, the demo; $XDG_STATE_HOME/blitzscale or "
            "~/.local/state/blitzscale. One stack at a time.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="What the workers compute on.")] = "cpu",
    engine: Annotated[EngineName, typer.Option(help="mock invents answers, for tests and benchmarks.")] = "torch",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    slo_ttft_ms: SloTtft = None,
    slo_tbt_ms: SloTbt = None,
    keep_alive_s: KeepAlive = None,
    profiles: Annotated[
        Path | None,
        typer.Option(
            help="Profiles made by `blitzscale profile`, or one of them; BLITZ_PROFILES by default.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    served_as: Served = None,
    advise: Annotated[
        bool, typer.Option("--advise", help="Only say what the load asks for; minimums and `scale` are carried out.")
    ] = False,
    gpu_hour_cost: Annotated[
        float, typer.Option(min=0, help="What an hour of a worker's GPU costs, for the metrics.", show_default=False)
    ] = 0.0,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Services' warnings go to the log files only, too.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds to wait until every model serves.")
    ] = 300.0,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", "-d", help="Return when every model serves; the stack lives on until `blitzscale down`."
        ),
    ] = False,
) -> None:
    """Start everything on this machine (NATS, Redis, all services) and serve until Ctrl-C."""
    if (own := os.environ.get("BLITZ_WORKER_ENGINE", "")) not in ("", engine):
        raise StackRefused(
            f"BLITZ_WORKER_ENGINE={own}: workers that `up` starts have the engine that --engine names ({engine}); "
            "`python -m compose.workers` starts others"
        )
    folder = state_directory(state_dir)
    sink = ConsoleSink()
    served = (*(models or ()), *(model or ()))
    num_needed = len(served) * len(SERVED_BY[served_as or ""])
    config = StackConfig(
        models=served,
        state_dir=folder,
        workers=workers if workers is not None else max(default_workers(), num_needed),
        planners=planners,
        monitors=monitors,
        pools=pools,
        gateways=gateways,
        host=host,
        port=port,
        device=device,
        engine=engine,
        log_level=log_level,
        slo_ttft_s=seconds(slo_ttft_ms),
        slo_tbt_s=seconds(slo_tbt_ms),
        keep_alive_s=keep_alive_s,
        profiles=profiles.expanduser() if profiles is not None else None,
        served_as=served_as or "",
        service_env={
            "planner": {"BLITZ_PLANNER_ADVISE": "1"} if advise else {},
            "pool": {"BLITZ_POOL_GPU_HOUR_COST": str(gpu_hour_cost)} if gpu_hour_cost else {},
        },
    )
    if not config.models:
        # A port in use is refused before anything is written.
        preflight.check(config)
        config = _with_demo(config, lambda text: sink(LOG_NAME, text))
    if not detach:
        asyncio.run(_serve(config, sink, quiet, timeout_s, lambda texts: sink.write("\n".join(texts))))
        return
    stop = f"blitzscale down --state-dir {shlex.quote(str(folder))}"

    def work(launcher: Launcher) -> None:
        asyncio.run(_serve(config, launcher.line, quiet, timeout_s, launcher.ready, stop=stop))

    launch(work, sink, sink.write)


def _with_demo(config: StackConfig, say: Callable[[str], None]) -> StackConfig:
    from dataclasses import replace

    try:
        path = ensure_demo_model(config.state_dir / "models")
    except OSError as error:
        raise StackRefused(f"the state directory {config.state_dir} cannot be used: {error.strerror}") from error
    say(f"no MODEL_DIR given: serving {path}")
    say("its weights are random, so its text is noise; give a checkpoint directory for real text")
    return replace(config, models=(path,))


async def _serve(
    config: StackConfig,
    sink: LineSink,
    quiet: bool,
    timeout_s: float,
    on_ready: Callable[[Sequence[str]], None],
    *,
    stop: str = "",
) -> None:
    """Until a signal. ``on_ready`` gets the summary, with ``stop`` as the way to end it."""
    shows_all = config.log_level.lower() == "debug"

    def line(name: str, text: str) -> None:
        if not quiet and (shows_all or worth_showing(name, text)):
            sink(name, text)

    stack = Stack(config, sink=line, say=lambda text: sink(LOG_NAME, text))
    serving = asyncio.create_task(_until_cancelled(stack, timeout_s, on_ready, stop), name="serve")
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            stack.say("stopping: streams finish first; press Ctrl-C again to kill everything at once")
            serving.cancel()
        else:
            stack.say("killing everything")
            stack.kill_all()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        await serving
    except asyncio.CancelledError:
        if not signals:
            raise
        sink(LOG_NAME, "stopped")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _until_cancelled(
    stack: Stack, timeout_s: float, on_ready: Callable[[Sequence[str]], None], stop: str
) -> None:
    async with stack:
        if first := stack.config.first_health_port:
            last = first + stack.config.num_health_ports - 1
            stack.say(
                f"health and metrics of pools, planners, monitors and workers, in this order: ports {first} to {last}"
            )
        status = await stack.wait_ready(timeout_s)
        stack.note(f"serves at {', '.join(stack.urls)}")
        with_key, logs = stack.config.needs_api_key, _logs(stack.config.state_dir)
        on_ready(summary(stack.url, status, others=stack.urls[1:], with_key=with_key, stop=stop, logs=logs))
        await stack.wait_gave_up()


def _logs(state_dir: Path) -> str:
    folder = state_dir.expanduser().absolute()
    usual = folder == default_state_dir().expanduser().absolute()
    return "blitzscale logs -f" + ("" if usual else f" --state-dir {shlex.quote(str(folder))}")


def summary(
    url: str,
    status: Status,
    *,
    others: tuple[str, ...] = (),
    with_key: bool = False,
    stop: str = "",
    logs: str = "blitzscale logs -f",
) -> tuple[str, ...]:
    """Where it is, what it serves, and two ways to try it, ready to paste. ``others``: the URLs of other gateways.
    ``with_key``: requests need one. ``stop``: the command that stops it, where Ctrl-C does not. ``logs``: what shows
    its lines."""
    names = [model.name for model in status.models]
    model = names[0] if names else "MODEL"
    authorization = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if with_key else ""
    key = f'os.environ["{API_KEY_VARIABLE}"]' if with_key else '"none"'
    next_steps = (
        (f"blitzscale scale {model} 2 --url {url}", "more instances now"),
        (f"blitzscale status --url {url}", f"what runs{'' if stop else ';  Ctrl-C here stops everything'}"),
        (f"{url}/ui", "the same as a page: watch it scale"),
        (logs, "what each process says"),
        *(((stop, "stops everything"),) if stop else ()),
    )
    return (
        "",
        f"  BlitzScale serves at {url}  ({len(status.workers)} workers)",
        *((f"  and at {', '.join(others)}",) if others else ()),
        f"  models: {', '.join(names) or 'none yet: blitzscale models add MODEL_DIR'}",
        "",
        *((f"  export {API_KEY_VARIABLE}=...      one of the gateway's keys", "") if with_key else ()),
        f"  curl {url}/v1/chat/completions{authorization} -H 'Content-Type: application/json' \\",
        f'    -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}\'',
        "",
        *(("  import os",) if with_key else ()),
        "  from openai import OpenAI",
        f'  client = OpenAI(base_url="{url}/v1", api_key={key})',
        '  messages = [{"role": "user", "content": "Hello"}]',
        f'  stream = client.chat.completions.create(model="{model}", messages=messages, max_tokens=32, stream=True)',
        "  for chunk in stream:",
        '      print(chunk.choices[0].delta.content or "", end="", flush=True)',
        "",
        *(f"  {what:<{max(len(what) for what, _ in next_steps)}}  {meaning}" for what, meaning in next_steps),
        "",
    )
