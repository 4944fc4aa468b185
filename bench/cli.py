"""``blitzscale bench``: benchmarks, each loaded only when it is asked for."""

from __future__ import annotations

import importlib

import typer

from bench.command_line import say

app = typer.Typer(help="Measure parts of the system on this machine.", add_completion=False, no_args_is_help=True)

# Everything after the name, --help included, is for the benchmark itself.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def _hand_over(context: typer.Context, module: str, *, takes: str = "", pass_on: bool = False) -> None:
    """Run the typer function ``command`` of ``module``, which may need torch, with the arguments left.

    ``takes``: about how long with its defaults, which is said before. ``pass_on``: it hands arguments that it does not
    know to yet another command.
    """
    if takes and not {"-h", "--help"} & set(context.args):
        say(f"{context.command_path}: with its defaults about {takes} on two cores that do nothing else")
    single = typer.Typer(add_completion=False)
    single.command(context_settings=_PASS_ON if pass_on else None)(importlib.import_module(module).command)
    typer.main.get_command(single)(args=list(context.args), prog_name=context.command_path)


@app.callback()
def bench() -> None:
    """Measure parts of the system on this machine."""


@app.command("transport", context_settings=_PASS_ON, add_help_option=False)
def transport(context: typer.Context) -> None:
    """GB/s between two processes of this machine over UCX, beside a plain memory copy in the same run."""
    _hand_over(context, "bench.transport", takes="half a minute")


@app.command("autoscale", context_settings=_PASS_ON, add_help_option=False)
def autoscale(context: typer.Context) -> None:
    """A trace against a stack of one instance: how the monitor scales it, and whether every token stays right."""
    _hand_over(context, "bench.autoscale", takes="as long as its trace, and a minute", pass_on=True)


@app.command("chaos", context_settings=_PASS_ON, add_help_option=False)
def chaos(context: typer.Context) -> None:
    """Everything is killed at random under load: requests that fail, answers that differ, how long streams pause."""
    _hand_over(context, "bench.chaos.cli", takes="two minutes")


@app.command("chunk", context_settings=_PASS_ON, add_help_option=False)
def chunk(context: typer.Context) -> None:
    """Time between tokens while long prompts come: a constant chunk against one that follows from the objective."""
    _hand_over(context, "bench.chunk", takes="a minute")


@app.command("vllm", context_settings=_PASS_ON, add_help_option=False)
def vllm(context: typer.Context) -> None:
    """The first token of a model that vLLM serves and that has no instance, beside vLLM alone. Needs root."""
    _hand_over(context, "bench.vllm.first_token", takes="twelve minutes")


@app.command("vllm-api", context_settings=_PASS_ON, add_help_option=False)
def vllm_api(context: typer.Context) -> None:
    """What lies between a client and vLLM: a stack whose worker serves with vLLM, beside vLLM's own server."""
    _hand_over(context, "bench.vllm.api", takes="four minutes")


@app.command("vllm-turns", context_settings=_PASS_ON, add_help_option=False)
def vllm_turns(context: typer.Context) -> None:
    """Models of vLLM and of our engine on the same three workers, asked in turn, from no instance at all."""
    _hand_over(context, "bench.vllm.turns", takes="four minutes")


@app.command("cold", context_settings=_PASS_ON, add_help_option=False)
def cold(context: typer.Context) -> None:
    """The first requests of a new instance against those that come later, by how the instance came."""
    _hand_over(context, "bench.cold", takes="three minutes")


@app.command("control", context_settings=_PASS_ON, add_help_option=False)
def control(context: typer.Context) -> None:
    """What the control plane costs with simulated workers by the thousand, and how fast it is."""
    _hand_over(context, "bench.control.cli", takes="two minutes")


@app.command("decisions", context_settings=_PASS_ON, add_help_option=False)
def decisions(context: typer.Context) -> None:
    """What a decision of the control plane costs in CPU time, and how that grows with the cluster."""
    _hand_over(context, "bench.decisions.cli", takes="four minutes")


@app.command("drain", context_settings=_PASS_ON, add_help_option=False)
def drain(context: typer.Context) -> None:
    """Seconds until a worker under long answers is free, with and without migration, and what streams see of it."""
    _hand_over(context, "bench.drain", takes="three minutes")


@app.command("engine", context_settings=_PASS_ON, add_help_option=False)
def engine(context: typer.Context) -> None:
    """Tokens per second of the engine, against a reference on the same machine."""
    _hand_over(context, "bench.engine.cli", takes="five minutes")


@app.command("evaluate", context_settings=_PASS_ON, add_help_option=False)
def evaluate(context: typer.Context) -> None:
    """Systems on windows of a trace, as in the paper's evaluation, with several hosts on this machine."""
    _hand_over(context, "bench.evaluate.cli", takes="two minutes for each system")


@app.command("fidelity", context_settings=_PASS_ON, add_help_option=False)
def fidelity(context: typer.Context) -> None:
    """The simulator beside the lab: the runs of an evaluation, simulated."""
    _hand_over(context, "bench.fidelity.cli", takes="a minute for each run")


@app.command("fleet", context_settings=_PASS_ON, add_help_option=False)
def fleet(context: typer.Context) -> None:
    """Many small models on few workers, against a worker for every few models and a worker for each."""
    _hand_over(context, "bench.fleet.cli", takes="four minutes")


@app.command("gateway", context_settings=_PASS_ON, add_help_option=False)
def gateway(context: typer.Context) -> None:
    """What gateway, bus and worker loop add to the first token, and tokens per second of one gateway process."""
    _hand_over(context, "bench.gateway.cli", takes="two minutes")


@app.command("gpu", context_settings=_PASS_ON, add_help_option=False)
def gpu(context: typer.Context) -> None:
    """What one GPU does: the engine on it, checksums, bytes between processes, attention, products, and host memory."""
    _hand_over(context, "bench.gpu.cli", takes="fifteen minutes")


@app.command("hostile", context_settings=_PASS_ON, add_help_option=False)
def hostile(context: typer.Context) -> None:
    """What hostile clients, all at once, do to another client's first token and to the gateway's memory."""
    _hand_over(context, "bench.hostile.cli", takes="a minute")


@app.command("page", context_settings=_PASS_ON, add_help_option=False)
def page(context: typer.Context) -> None:
    """What ten readers of the page's feed cost a gateway: CPU time per token, and tokens per second."""
    _hand_over(context, "bench.page", takes="four minutes")


@app.command("pd", context_settings=_PASS_ON, add_help_option=False)
def pd(context: typer.Context) -> None:
    """Prefill and decode on instances of their own, against the same workers that do both, between several hosts."""
    _hand_over(context, "bench.pd.cli", takes="five minutes")


@app.command("plan", context_settings=_PASS_ON, add_help_option=False)
def plan(context: typer.Context) -> None:
    """How long the multicast planner thinks at a thousand and ten thousand GPUs."""
    _hand_over(context, "bench.plan")


@app.command("prefix", context_settings=_PASS_ON, add_help_option=False)
def prefix(context: typer.Context) -> None:
    """What the prefix cache is worth, and what it is worth to send prompts to where their beginning was computed."""
    _hand_over(context, "bench.prefix.cli", takes="25 minutes")


@app.command("recording", context_settings=_PASS_ON, add_help_option=False)
def recording(context: typer.Context) -> None:
    """What services decided in the lab, decided again from what they heard: the same verdicts, plans and routes."""
    _hand_over(context, "bench.recording.cli")


@app.command("scaleout", context_settings=_PASS_ON, add_help_option=False)
def scaleout(context: typer.Context) -> None:
    """Time to scale out by chain, star and disk, between several hosts on this machine with a rate on each link."""
    _hand_over(context, "bench.scaleout.cli", takes="four minutes")


@app.command("live", context_settings=_PASS_ON, add_help_option=False)
def live(context: typer.Context) -> None:
    """Live scaling under a burst, between two hosts on this machine: against stop the world and the playback."""
    _hand_over(context, "bench.live.cli", takes="five minutes")


@app.command("loaders", context_settings=_PASS_ON, add_help_option=False)
def loaders(context: typer.Context) -> None:
    """How fast a checkpoint comes into memory: safetensors, the Run:ai streamer, ours from disk and from a peer."""
    _hand_over(context, "bench.loaders.cli", takes="three minutes")


@app.command("turns", context_settings=_PASS_ON, add_help_option=False)
def turns(context: typer.Context) -> None:
    """Many models on two workers, asked in turn: how long it takes until all have been answered."""
    _hand_over(context, "bench.turns", takes="three minutes")


@app.command("zero", context_settings=_PASS_ON, add_help_option=False)
def zero(context: typer.Context) -> None:
    """The first token of a model that sleeps, from a host copy, over a link and from disk, against the ideal."""
    _hand_over(context, "bench.zero.cli", takes="four minutes")


@app.command("zigzag", context_settings=_PASS_ON, add_help_option=False)
def zigzag(context: typer.Context) -> None:
    """Schedules of live scaling, played back: against its baselines and the optimum, and how long the ILP takes."""
    _hand_over(context, "bench.zigzag.cli", takes="two minutes")
