"""What the dashboard shows, and how Prometheus is asked for it.

``$model`` is the models chosen in Grafana, as a regular expression; ``$__rate_interval`` and ``$__range`` are its own.
"""

from __future__ import annotations

from dataclasses import dataclass

RATE = "[$__rate_interval]"
RANGE = "[$__range]"
OPERATIONS = "[1h]"
"""Scale operations are rare."""
OF_MODEL = '{model_name=~"$model"}'


@dataclass(frozen=True, slots=True)
class Query:
    """One question to Prometheus."""

    expr: str
    legend: str
    exemplars: bool = False
    """Whether traces are shown as points."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    """Grafana's id of it."""
    stacked: bool = False
    totals: bool = False
    """Of the whole range shown, one number for each series, rather than a line."""


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under one title."""

    title: str
    panels: tuple[Panel, ...]


def _rate(metric: str, by: str, labels: str = OF_MODEL) -> str:
    return f"sum by ({by}) (rate({metric}{labels}{RATE}))"


def _increase(metric: str, by: str, labels: str = OF_MODEL) -> str:
    return f"sum by ({by}) (increase({metric}{labels}{RANGE}))"


def _quantile(quantile: float, metric: str, by: str, labels: str = OF_MODEL, window: str = RATE) -> str:
    return f"histogram_quantile({quantile}, sum by (le, {by}) (rate({metric}_bucket{labels}{window})))"


def _latency(title: str, metric: str, *, exemplars: bool = False) -> Panel:
    queries = (
        Query(_quantile(0.5, metric, "model_name"), "{{model_name}} p50"),
        Query(_quantile(0.99, metric, "model_name"), "{{model_name}} p99", exemplars),
    )
    return Panel(title, queries, "s")


COST = "/ 3600 * on () group_left () max(blitz_gpu_hour_cost)"
"""Of GPU seconds."""
GPU_SECONDS = _increase("blitz_gpu_seconds_total", "model_name", '{model_name=~"$model|"}')
KEY_TOKENS = _increase("blitz_gateway_key_tokens_total", "key, model_name")
MODEL_TOKENS = f"({_increase('blitz_gateway_key_tokens_total', 'model_name')} > 0)"
KEY_SHARE = f"{KEY_TOKENS} / on (model_name) group_left () {MODEL_TOKENS}"
KEY_GPU_SECONDS = f"sum by (key) ({KEY_SHARE} * on (model_name) group_left () {GPU_SECONDS})"
"""Each key's share of a model's tokens, of the model's GPU seconds."""
OTHER_GPU_SECONDS = f"{GPU_SECONDS} unless on (model_name) {MODEL_TOKENS}"
"""Of idle workers, and of models that no key used."""

ROWS = (
    PanelRow(
        "Requests",
        (
            Panel(
                "Running requests",
                (Query(f"sum by (model_name) (vllm:num_requests_running{OF_MODEL})", "{{model_name}}"),),
                stacked=True,
            ),
            Panel(
                "Waiting requests, by what they wait for",
                (Query(f"sum by (reason) (blitz_gateway_waiting_requests{OF_MODEL})", "{{reason}}"),),
                stacked=True,
            ),
            _latency("Time to first token", "vllm:time_to_first_token_seconds", exemplars=True),
            _latency("Time between tokens", "vllm:inter_token_latency_seconds"),
            Panel(
                "Tokens",
                (
                    Query(_rate("vllm:prompt_tokens_total", "model_name"), "{{model_name}} prompt"),
                    Query(_rate("vllm:generation_tokens_total", "model_name"), "{{model_name}} generated"),
                ),
                "cps",
            ),
            Panel(
                "Requests that ended",
                (
                    Query(
                        _rate("vllm:request_success_total", "model_name, finished_reason"),
                        "{{model_name}} {{finished_reason}}",
                    ),
                ),
                "reqps",
                stacked=True,
            ),
        ),
    ),
    PanelRow(
        "Models",
        (
            Panel(
                "Instances, by state",
                (Query(f"sum by (model_name, state) (blitz_instances{OF_MODEL})", "{{model_name}} {{state}}"),),
                stacked=True,
            ),
            Panel(
                "Wanted instances",
                (
                    Query(
                        'sum by (model, role) (blitz_monitor_desired_instances{model=~"$model"})',
                        "{{model}} {{role}} by load",
                    ),
                    Query(
                        f"max by (model_name, role) (blitz_min_instances{OF_MODEL})", "{{model_name}} {{role}} at least"
                    ),
                ),
            ),
            Panel("Workers, by state", (Query("sum by (state) (blitz_pool_workers)", "{{state}}"),), stacked=True),
            Panel(
                "KV in use",
                (Query(f"avg by (model_name) (vllm:kv_cache_usage_perc{OF_MODEL})", "{{model_name}}"),),
                "percentunit",
            ),
            Panel(
                "Models without a copy",
                (
                    Query("max(blitz_pool_models_without_host_copy)", "none placed"),
                    Query("max(blitz_pool_models_on_disk)", "on disk only"),
                    Query("max(blitz_pool_models_without_copy)", "nowhere"),
                ),
            ),
        ),
    ),
    PanelRow(
        "Scaling",
        (
            Panel(
                "Scaling out, from the trigger (median of an hour)",
                (Query(_quantile(0.5, "blitz_scale_seconds", "phase", "", OPERATIONS), "{{phase}}", exemplars=True),),
                "s",
            ),
            Panel(
                "Scaling out, from the trigger (p99 of an hour)",
                (Query(_quantile(0.99, "blitz_scale_seconds", "phase", "", OPERATIONS), "{{phase}}", exemplars=True),),
                "s",
            ),
            Panel(
                "Plans within an hour",
                (
                    Query(
                        f"sum by (direction) (increase(blitz_planner_plans_total{OPERATIONS}))",
                        "{{direction}}",
                    ),
                ),
            ),
            Panel(
                "Transfers",
                (
                    Query(
                        _rate("blitz_worker_transfer_bytes_total", "purpose, way", '{direction="sent"}') + " * 8 / 1e9",
                        "{{purpose}} {{way}}",
                    ),
                ),
                "Gbits",
                stacked=True,
            ),
        ),
    ),
    PanelRow(
        "GPUs and cost",
        (
            Panel(
                "GPUs, by model",
                (
                    Query(
                        _rate("blitz_gpu_seconds_total", "model_name, state", '{model_name=~"$model|"}'),
                        "{{model_name}} {{state}}",
                    ),
                ),
                stacked=True,
            ),
            Panel("GPU hours, by model", (Query(f"{GPU_SECONDS} / 3600", "{{model_name}}"),), totals=True),
            Panel("Cost, by model", (Query(f"{GPU_SECONDS} {COST}", "{{model_name}}"),), totals=True),
            Panel(
                "Cost, by key",
                (
                    Query(f"{KEY_GPU_SECONDS} {COST}", "{{key}}"),
                    Query(f"sum({OTHER_GPU_SECONDS}) {COST}", "idle, or used without a key"),
                ),
                totals=True,
            ),
        ),
    ),
    PanelRow(
        "Services",
        (
            Panel(
                "Event loop lag (p99)",
                (Query(_quantile(0.99, "blitz_event_loop_lag_seconds", "instance", ""), "{{instance}}"),),
                "s",
            ),
            Panel(
                "Leaders",
                (
                    Query("sum(blitz_pool_leads)", "pool"),
                    Query("sum(blitz_planner_leads)", "planner"),
                    Query("sum(blitz_monitor_leads)", "monitor"),
                ),
            ),
            Panel(
                "HTTP answers",
                (Query(_rate("blitz_gateway_http_responses_total", "status", ""), "{{status}}"),),
                "reqps",
                stacked=True,
            ),
        ),
    ),
)  # fmt: skip
