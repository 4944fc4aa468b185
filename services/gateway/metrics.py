"""What the gateway counts of its requests, under its own names and vLLM's; and the load that instances report.

Counting costs a bisection; exporting does the rest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.gateway.active_requests import ActiveRequests
from services.gateway.core.latencies import TBT_BUCKETS_S, TTFT_BUCKETS_S
from services.gateway.core.router import Router
from services.gateway.core.routes import RouteView
from services.gateway.core.waiting import WaitReason, waiting_by_reason
from shared.messages.load import LoadReport

E2E_BUCKETS_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
REQUEST_BUCKETS_TOKENS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0,
    100000.0, 200000.0, 500000.0, 1000000.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _OfModel:
    """A metric with a series for each model (label ``model_name``)."""

    name: str
    text: str
    attribute: str
    """Where its values are."""


class ModelCounter(_OfModel):
    """Of ``ModelMetrics``."""


class ModelGauge(_OfModel):
    """Of ``ModelGauges``."""


class ModelHistogram(_OfModel):
    """Of ``ModelMetrics``."""


_MODEL_COUNTERS = (
    ModelCounter("blitz_gateway_failovers", "Attempts given up and continued elsewhere.", "failovers"),
    ModelCounter("blitz_gateway_resends", "Times that the gateway asked a worker for tokens again.", "resends"),
    ModelCounter(
        "blitz_gateway_refusals",
        "Times that an instance was full and the request went back into the queue.",
        "refusals",
    ),
    ModelCounter(
        "blitz_gateway_moves",
        "Times that a running request moved to another instance, its stream unbroken: migration, disaggregated "
        "serving, live scaling.",
        "moves",
    ),
    ModelCounter(
        "blitz_gateway_sent_back",
        "Times that an instance which was to go sent a request back into the queue; no failover.",
        "sent_back",
    ),
    ModelCounter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ModelCounter("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
)
_MODEL_GAUGES = (
    ModelGauge("vllm:num_requests_running", "Requests of this gateway that get tokens.", "running_requests"),
    ModelGauge(
        "vllm:num_requests_waiting",
        "Requests of this gateway that wait for their first token, here or at an instance.",
        "waiting_requests",
    ),
    ModelGauge("blitz_gateway_queued_requests", "Requests that wait at this gateway.", "gateway_queued_requests"),
    ModelGauge(
        "blitz_gateway_inflight_requests", "Requests of this gateway at instances.", "gateway_inflight_requests"
    ),
)
_MODEL_HISTOGRAMS = (
    ModelHistogram("vllm:time_to_first_token_seconds", "Arrival to first token.", "ttft_s"),
    ModelHistogram("blitz_gateway_time_to_first_token_seconds", "Arrival to first token.", "ttft_s"),
    ModelHistogram("vllm:inter_token_latency_seconds", "Time between tokens of one stream.", "itl_s"),
    ModelHistogram("blitz_gateway_inter_token_latency_seconds", "Time between tokens of one stream.", "itl_s"),
    ModelHistogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", "e2e_s"),
    ModelHistogram("blitz_gateway_e2e_request_latency_seconds", "Arrival to last token.", "e2e_s"),
    ModelHistogram("vllm:request_queue_time_seconds", "Arrival to the hand-over to an instance.", "queue_s"),
    ModelHistogram("vllm:request_prefill_time_seconds", "Hand-over to first token, with the wait there.", "prefill_s"),
    ModelHistogram("vllm:request_decode_time_seconds", "First token to last.", "decode_s"),
    ModelHistogram("vllm:request_prompt_tokens", "Prompt tokens of requests that ended.", "request_prompt_tokens"),
    ModelHistogram(
        "vllm:request_generation_tokens", "Tokens generated for requests that ended.", "request_generation_tokens"
    ),
    ModelHistogram(
        "vllm:request_max_num_generation_tokens",
        "Tokens generated for requests that ended. Each of a request's choices counts; vLLM counts its longest.",
        "request_generation_tokens",
    ),
)


def counter_family(name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
    """A counter with a value for each label, or tuple of labels."""
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def gauge_family(name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
    """A gauge with a value for each label, or tuple of labels."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _filled(made: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Any, float]) -> Metric:
    # Copied first, because the event loop may add one in the meantime.
    for key, value in sorted(dict(values).items()):
        made.add_metric([str(label) for label in (key if isinstance(key, tuple) else (key,))], value)
    return made


@dataclass(frozen=True, slots=True)
class TracedValue:
    """A value that a bucket has counted, and the trace that shows it."""

    trace_id: str
    value: float
    at_s: float
    """Unix time."""


class Histogram:
    """Bucket counters of one series; not thread-safe (the event loop owns it)."""

    __slots__ = ("_bounds", "_counts", "_sum", "exemplars")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self.exemplars: dict[int, TracedValue] = {}
        """The newest of each bucket, by its place."""

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def counts(self) -> Sequence[int]:
        """Values by bucket; the last one is beyond all bounds."""
        return self._counts

    def observe_traced(self, value: float, trace_id: str, at_s: float) -> None:
        """Count one value, which a trace shows; ``at_s``: Unix time."""
        self.observe(value)
        self.exemplars[bisect_left(self._bounds, value)] = TracedValue(trace_id, value, at_s)

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, values at or below it) and the sum of all values."""
        rows, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows, self._sum


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _exemplar_text(exemplar: TracedValue) -> str:
    return f'# {{trace_id="{exemplar.trace_id}"}} {exemplar.value} {exemplar.at_s:.3f}'


@dataclass(slots=True)
class ModelMetrics:
    """The counters of one model."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    failovers: int = 0
    resends: int = 0
    refusals: int = 0
    moves: int = 0
    sent_back: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Requests that ended: ``stop``, ``length``, ``abort`` (the client left) or ``error``."""
    ttft_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    itl_s: Histogram = field(default_factory=lambda: Histogram(TBT_BUCKETS_S))
    e2e_s: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS_S))
    queue_s: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS_S))
    prefill_s: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS_S))
    decode_s: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS_S))
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_TOKENS))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_TOKENS))


@dataclass(frozen=True, slots=True)
class ModelGauges:
    """A model's requests at this gateway now: those of several gateways add up."""

    model: str
    running_requests: int
    waiting_requests: int
    gateway_queued_requests: int
    gateway_inflight_requests: int
    waiting_by_reason: Mapping[WaitReason, int]
    """Of ``waiting_requests``."""


class GatewayMetrics:
    """All models' counters and the HTTP ones."""

    def __init__(self, routes: RouteView) -> None:
        """``routes``: what is registered, and so what has counters."""
        self._routes = routes
        self._models: dict[str, ModelMetrics] = {}
        self.responses: Counter[tuple[str, int]] = Counter()
        """HTTP responses by route and status. A route is a pattern, never a raw path."""
        self.cuts: Counter[str] = Counter()
        """Clients that were cut off, by reason."""
        self.resubmissions: Counter[str] = Counter()
        """Attempts continued under a new one, by reason: of ``LossReason``, or an error's code."""
        self.sources: list[Callable[[], Iterable[Metric]]] = []
        """Further metrics, read at export."""

    def of(self, model: str) -> ModelMetrics:
        """The counters of a model. Of one that is registered no more, and whose last requests still run, nobody reads
        them."""
        metrics = self._models.get(model)
        if metrics is None:
            metrics = ModelMetrics()
            if model in self._routes.models:
                self._models[model] = metrics
        return metrics

    def forget(self, model: str) -> None:
        """The model is registered no more."""
        self._models.pop(model, None)

    def latencies(self) -> Iterator[tuple[str, int, Sequence[int], Sequence[int]]]:
        """Of each model: its name, the tokens that it has put out, and TTFT and TBT by bucket."""
        for name, model in self._models.items():
            yield name, model.generation_tokens, model.ttft_s.counts, model.itl_s.counts

    def count_cut(self, reason: str) -> None:
        """One client's connection was closed by the gateway, or its response given up."""
        self.cuts[reason] += 1

    def families(self, gauges: tuple[ModelGauges, ...]) -> Iterator[Metric]:
        """Everything except the histograms, with these gauges. May run in a thread: counters are only read."""
        yield counter_family(
            "blitz_gateway_http_responses",
            "HTTP responses; status 499: the client left.",
            ["route", "status"],
            self.responses,
        )
        yield counter_family(
            "blitz_gateway_cut_off",
            "Clients that the gateway cut off: slow_reader, send_timeout, memory (of responses together), "
            "read_timeout, head_too_large (over 64 KiB), too_many_connections.",
            ["reason"],
            self.cuts,
        )
        yield counter_family(
            "blitz_gateway_resubmissions",
            "Failovers by reason: closed (the worker's connection was closed, and nothing is subscribed in its place), "
            "gone (nothing is subscribed under its name), silent (no sign of life), or the code of the error.",
            ["reason"],
            self.resubmissions,
        )
        for source in self.sources:
            yield from source()
        # At once, because the event loop may add a model in the meantime.
        models = list(self._models.items())
        for counter in _MODEL_COUNTERS:
            counts = {model: getattr(counters, counter.attribute) for model, counters in models}
            yield counter_family(counter.name, counter.text, ["model_name"], counts)
        ended = {(m, reason): n for m, counters in models for reason, n in dict(counters.finished).items()}
        yield counter_family(
            "vllm:request_success",
            "Requests that ended: stop, length, abort (the client left), error.",
            ["model_name", "finished_reason"],
            ended,
        )
        for gauge in _MODEL_GAUGES:
            values = {of_model.model: float(getattr(of_model, gauge.attribute)) for of_model in gauges}
            yield gauge_family(gauge.name, gauge.text, ["model_name"], values)
        yield gauge_family(
            "blitz_gateway_waiting_requests",
            "vllm:num_requests_waiting by what they wait for: starting (an instance that is on its way), no_instance "
            "(there is none, and none on its way), full (the instances take none now), too_long (for the instances "
            "that there are), at_instance (the first token there).",
            ["model_name", "reason"],
            {(of_model.model, why): n for of_model in gauges for why, n in of_model.waiting_by_reason.items()},
        )

    def histograms_text(self, *, with_exemplars: bool) -> str:
        """The histograms as Prometheus text; ``with_exemplars``: as OpenMetrics. By hand: of hundreds of models they
        are nearly all that there is, and a hundred thousand objects would be made for them. May run in a thread."""
        text: list[str] = []
        for shown in _MODEL_HISTOGRAMS:
            name = shown.name
            text.append(f"# HELP {name} {shown.text}\n# TYPE {name} histogram\n")
            for model, metrics in sorted(self._models.items()):
                label = f'model_name="{_escaped(model)}"'
                histogram: Histogram = getattr(metrics, shown.attribute)
                buckets, total = histogram.cumulative()
                lines = [f'{name}_bucket{{le="{bound}",{label}}} {count}\n' for bound, count in buckets]
                if with_exemplars:
                    for place, shown_by in dict(histogram.exemplars).items():
                        lines[place] = f"{lines[place][:-1]} {_exemplar_text(shown_by)}\n"
                text += lines
                text.append(f"{name}_count{{{label}}} {buckets[-1][1]}\n{name}_sum{{{label}}} {total}\n")
        return "".join(text)


def model_gauges(routes: RouteView, requests: ActiveRequests, router: Router) -> Iterator[ModelGauges]:
    """One row per registered model."""
    inflight, running = requests.inflight_by_model(), requests.running_by_model()
    for name in routes.models:
        queued, at_instances, with_tokens = router.queued(name)[0], inflight.get(name, 0), running.get(name, 0)
        yield ModelGauges(
            model=name,
            running_requests=with_tokens,
            waiting_requests=queued + at_instances - with_tokens,
            gateway_queued_requests=queued,
            gateway_inflight_requests=at_instances,
            waiting_by_reason=waiting_by_reason(name, router, routes, at_instances - with_tokens),
        )


FRESH_S = 3.0
"""Older reports say nothing about now."""


class LoadGauges:
    """Load reports by instance."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, LoadReport]] = {}
        self._pruned_s = -math.inf

    def take(self, report: LoadReport, now_s: float) -> None:
        """Keep a report; ``now_s`` is monotonic. Instances that fell silent are forgotten, scraped or not."""
        self._reports[report.instance_id] = (now_s, report)
        if now_s - self._pruned_s > FRESH_S:
            self._prune(now_s)

    def __len__(self) -> int:
        """Reports held."""
        return len(self._reports)

    def latest(self, now_s: float) -> dict[str, LoadReport]:
        """The fresh reports by instance id; ``now_s`` is monotonic."""
        self._prune(now_s)
        return {instance_id: report for instance_id, (_, report) in self._reports.items()}

    def _prune(self, now_s: float) -> None:
        self._reports = {i: row for i, row in self._reports.items() if now_s - row[0] <= FRESH_S}
        self._pruned_s = now_s
