"""What somebody should look at, as rules of Prometheus, with what makes each fire and what does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from compose.boards.scrape import JOB

Samples = tuple[tuple[str, str], ...]
"""Series and their values, one a minute, in promtool's notation: ``1x10`` is 1 eleven times, ``0+2x10`` rises by 2."""
LAG_S = 0.5
CERTIFICATE_DAYS = 14
AHEAD_S = 1.0
ERROR_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule."""

    name: str
    expr: str
    for_: str
    """How long ``expr`` must give something."""
    severity: Literal["critical", "warning"]
    summary: str
    """May name labels, as ``{{ $labels.model_name }}``."""
    fires: Samples
    """With these it fires after ten minutes."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the alert that then fires, beside ``severity``."""
    quiet: Samples = ()
    """With these it does not."""
    shown: str = ""
    """The summary that then shows; empty: the same."""


def _leaderless(service: str, what: str) -> Alert:
    metric = f"blitz_{service}_leads"
    return Alert(
        f"BlitzScaleNo{service.capitalize()}Leads",
        f"(sum({metric}) or vector(0)) < 1",
        "30s",
        "critical",
        f"no {service} leads: {what}",
        ((metric + '{instance="a"}', "0x10"), (metric + '{instance="b"}', "0x10")),
        quiet=((metric + '{instance="a"}', "0x10"), (metric + '{instance="b"}', "1x10")),
    )


ALERTS = (
    Alert(
        "BlitzScaleDown",
        f'up{{job="{JOB}"}} == 0',
        "1m",
        "warning",
        "{{ $labels.instance }} does not answer Prometheus",
        ((f'up{{job="{JOB}",instance="a"}}', "0x10"), (f'up{{job="{JOB}",instance="b"}}', "1x10")),
        {"job": JOB, "instance": "a"},
        ((f'up{{job="{JOB}",instance="a"}}', "1x10"),),
        "a does not answer Prometheus",
    ),
    _leaderless("pool", "the registry answers nothing"),
    _leaderless("planner", "nothing is scaled"),
    _leaderless("monitor", "nothing is scaled by load"),
    Alert(
        "BlitzScaleModelBelowMinimum",
        'max by (model_name, role) (blitz_instances{state="serving"})'
        " < on (model_name, role) max by (model_name, role) (blitz_min_instances)",
        "2m",
        "critical",
        "{{ $labels.model_name }} has {{ $value }} {{ $labels.role }} instances that serve, fewer than its minimum",
        (
            ('blitz_instances{model_name="m",role="decode",state="serving"}', "1x10"),
            ('blitz_instances{model_name="m",role="decode",state="loading"}', "2x10"),
            ('blitz_min_instances{model_name="m",role="decode"}', "2x10"),
        ),
        {"model_name": "m", "role": "decode"},
        (
            ('blitz_instances{model_name="m",role="decode",state="serving"}', "2x10"),
            ('blitz_min_instances{model_name="m",role="decode"}', "2x10"),
            ('blitz_instances{model_name="zero",role="colocated",state="serving"}', "0x10"),
            ('blitz_min_instances{model_name="zero",role="colocated"}', "0x10"),
        ),
        "m has 1 decode instances that serve, fewer than its minimum",
    ),
    Alert(
        "BlitzScaleRequestsWithoutInstance",
        'sum by (model_name) (blitz_gateway_waiting_requests{reason="no_instance"}) > 0',
        "1m",
        "critical",
        "{{ $value }} requests wait for {{ $labels.model_name }}, which has no instance and none on its way",
        (
            ('blitz_gateway_waiting_requests{model_name="m",reason="no_instance",instance="a"}', "1x10"),
            ('blitz_gateway_waiting_requests{model_name="m",reason="no_instance",instance="b"}', "2x10"),
        ),
        {"model_name": "m"},
        (
            ('blitz_gateway_waiting_requests{model_name="m",reason="no_instance"}', "0x10"),
            ('blitz_gateway_waiting_requests{model_name="m",reason="starting"}', "9x10"),
        ),
        "3 requests wait for m, which has no instance and none on its way",
    ),
    Alert(
        "BlitzScaleModelsWithoutCopy",
        "max(blitz_pool_models_without_copy) > 0",
        "1m",
        "critical",
        "{{ $value }} models have no copy in any memory, and no worker can read them from disk",
        (("blitz_pool_models_without_copy", "1x10"),),
        quiet=(("blitz_pool_models_without_copy", "0x10"),),
        shown="1 models have no copy in any memory, and no worker can read them from disk",
    ),
    Alert(
        "BlitzScaleWorkersLost",
        "sum(increase(blitz_pool_expired_workers_total[5m])) > 0",
        "0s",
        "warning",
        "workers died, or were cut off, within the last five minutes",
        (("blitz_pool_expired_workers_total", "0x7 1x10"),),
        quiet=(("blitz_pool_expired_workers_total", "3x10"),),
    ),
    Alert(
        "BlitzScaleRequestsFail",
        'sum by (model_name) (rate(vllm:request_success_total{finished_reason="error"}[5m]))'
        f" > {ERROR_SHARE} * sum by (model_name) (rate(vllm:request_success_total[5m]))",
        "2m",
        "warning",
        f"more than {ERROR_SHARE:.0%} of the requests for {{{{ $labels.model_name }}}} end with an error",
        (
            ('vllm:request_success_total{model_name="m",finished_reason="error"}', "0+10x10"),
            ('vllm:request_success_total{model_name="m",finished_reason="stop"}', "0+90x10"),
        ),
        {"model_name": "m"},
        (
            ('vllm:request_success_total{model_name="m",finished_reason="error"}', "0+1x10"),
            ('vllm:request_success_total{model_name="m",finished_reason="stop"}', "0+90x10"),
        ),
        f"more than {ERROR_SHARE:.0%} of the requests for m end with an error",
    ),
    Alert(
        "BlitzScaleEventLoopLag",
        f"histogram_quantile(0.99, sum by (le, instance) (rate(blitz_event_loop_lag_seconds_bucket[5m]))) > {LAG_S}",
        "2m",
        "warning",
        "the event loop of {{ $labels.instance }} is late: heartbeats are at risk",
        (
            ('blitz_event_loop_lag_seconds_bucket{instance="a",le="0.5"}', "0+95x10"),
            ('blitz_event_loop_lag_seconds_bucket{instance="a",le="1.0"}', "0+100x10"),
            ('blitz_event_loop_lag_seconds_bucket{instance="a",le="+Inf"}', "0+100x10"),
        ),
        {"instance": "a"},
        (
            ('blitz_event_loop_lag_seconds_bucket{instance="a",le="0.5"}', "0+100x10"),
            ('blitz_event_loop_lag_seconds_bucket{instance="a",le="+Inf"}', "0+100x10"),
        ),
        "the event loop of a is late: heartbeats are at risk",
    ),
    Alert(
        "BlitzScaleNatsCertificateEnds",
        f"min(blitz_nats_certificate_end_timestamp_seconds > 0) - time() < {CERTIFICATE_DAYS} * 86400",
        "5m",
        "warning",
        f"the certificate of a NATS server is valid for less than {CERTIFICATE_DAYS} days",
        (("blitz_nats_certificate_end_timestamp_seconds", "86400x10"),),
        quiet=(
            ('blitz_nats_certificate_end_timestamp_seconds{instance="a"}', "0x10"),
            ('blitz_nats_certificate_end_timestamp_seconds{instance="b"}', "8640000x10"),
        ),
    ),
    Alert(
        "BlitzScaleClocksDiffer",
        f"abs(blitz_worker_clock_ahead_seconds) > {AHEAD_S:g}",
        "1m",
        "warning",
        "the clock of {{ $labels.instance }} differs from the pool's",
        (('blitz_worker_clock_ahead_seconds{instance="a"}', "-3x10"),),
        {"instance": "a"},
        (('blitz_worker_clock_ahead_seconds{instance="a"}', "0x10"),),
        "the clock of a differs from the pool's",
    ),
    Alert(
        "BlitzScaleMalformedMessages",
        "sum by (kind) (increase(blitz_bus_malformed_total[10m])) > 0",
        "0s",
        "warning",
        "messages on the bus do not decode ({{ $labels.kind }}): another version, or an intruder",
        (('blitz_bus_malformed_total{kind="lead.v1"}', "0x7 2x10"),),
        {"kind": "lead.v1"},
        (('blitz_bus_malformed_total{kind="lead.v1"}', "2x10"),),
        "messages on the bus do not decode (lead.v1): another version, or an intruder",
    ),
)
