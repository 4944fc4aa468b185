"""What was measured, as figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.control import histogram
from bench.control.orders import FleetResult
from bench.control.scaler import Parked
from bench.control.setting import Setting
from bench.control.tap import TapResult
from bench.stats import Summary

MAX_MESSAGE_BYTES = 256 * 1024
MAX_POOL_CORES = 0.5
MAX_HEARTBEAT_MS = 50.0
MAX_ROUTE_MS = 250.0
PROCESSES = ("pool", "monitor", "planner", "nats", "redis", "bench")
NOT_CONTROL = (".submit", ".hand_over")
"""How the subjects end whose messages are as large as their prompts."""


@dataclass(frozen=True, slots=True)
class Look:
    """What had been spent and done at one moment."""

    at_s: float
    cpu_s: Mapping[str, float]
    """By process."""
    bench_cpu_s: float
    rounds: Mapping[float, float]
    """The planner's, by upper bound of what they took, in seconds."""
    sent: int
    answered: int
    unsent: int
    scales: Counter[str]


@dataclass(frozen=True, slots=True)
class Result:
    """Everything of one run. Between ``before`` and ``after`` is what was measured; requests that fail at any time
    count."""

    setting: Setting
    before: Look
    after: Look
    fleets: Sequence[FleetResult]
    parked: Sequence[Parked]
    tap: TapResult
    ttft_s: Sequence[float]
    faults: Mapping[str, int]
    fault_example: str
    formed_s: float
    """From the first worker's start to the last model's instance and host copy."""
    restarts: int

    @property
    def seconds(self) -> float:
        return self.after.at_s - self.before.at_s

    def cores(self) -> dict[str, float]:
        """By process: CPU seconds per second."""
        spent = {name: self.after.cpu_s[name] - self.before.cpu_s[name] for name in self.before.cpu_s}
        spent["bench"] = self.after.bench_cpu_s - self.before.bench_cpu_s
        return {name: round(cpu_s / self.seconds, 4) for name, cpu_s in spent.items()}

    def heartbeat(self) -> Summary | None:
        """Round trips in ms."""
        return Summary.of(1000 * seconds for fleet in self.fleets for seconds in fleet.heartbeat_s)

    def routes(self) -> list[float]:
        """Milliseconds between a worker's report that it serves and the last gateway's first request there, of
        instances for which a request waited at every gateway."""
        taken: list[float] = []
        for parked in self.parked:
            served = [s for fleet in self.fleets for s in fleet.served if s.model == parked.model]
            after = sorted((s for s in served if s.at_s >= parked.sent_s), key=lambda s: s.at_s)
            if after and len(after[0].first_submit_s) == self.setting.gateways:
                taken.append(1000 * (max(after[0].first_submit_s.values()) - after[0].at_s))
        return taken

    def largest_message(self) -> tuple[str, int]:
        """Subject and size of the largest control message."""
        control = {
            name: size
            for name, size in self.tap.largest.items()
            if not name.removesuffix(" (answer)").endswith(NOT_CONTROL)
        }
        return max(control.items(), key=lambda entry: entry[1], default=("", 0))

    def problems(self) -> list[str]:
        """What must not be, however slow the machine."""
        subject, size = self.largest_message()
        found = [f"{count} requests failed: {kind}" for kind, count in self.faults.items()]
        if size > MAX_MESSAGE_BYTES:
            found.append(f"a message of {size} bytes on {subject}")
        if self.restarts:
            found.append(f"{self.restarts} processes died")
        return found

    def document(self) -> dict[str, Any]:
        """The result file."""
        setting, heartbeat, route = self.setting, self.heartbeat(), Summary.of(self.routes())
        ttft = Summary.of(1000 * seconds for seconds in self.ttft_s)
        subject, size = self.largest_message()
        largest = sorted(self.tap.largest.items(), key=lambda entry: -entry[1])
        cores = self.cores()
        round_s = histogram.quantile(self.before.rounds, self.after.rounds, 0.99)
        scales = self.after.scales - self.before.scales
        return {
            "workers": setting.workers,
            "models": setting.models,
            "hosts": setting.hosts,
            "seconds": round(self.seconds, 2),
            "report_interval_s": setting.report_interval_s,
            **{f"{name}_cores": cores[name] for name in PROCESSES},
            "gateway_cores": max(value for name, value in cores.items() if name.startswith("gateway")),
            "heartbeat_ms_p50": _rounded(heartbeat.p50 if heartbeat else None),
            "heartbeat_ms_p99": _rounded(heartbeat.p99 if heartbeat else None),
            "heartbeats": heartbeat.count if heartbeat else 0,
            "heartbeats_missed": sum(fleet.heartbeats_missed for fleet in self.fleets),
            "route_ms_p50": _rounded(route.p50 if route else None),
            "route_ms_p99": _rounded(route.p99 if route else None),
            "routes": route.count if route else 0,
            "round_ms_p99": None if round_s is None else _rounded(1000 * round_s),
            "rounds": round(max(self.after.rounds.values(), default=0) - max(self.before.rounds.values(), default=0)),
            "message_bytes_max": size,
            "message_subject": subject,
            "largest_messages": dict(largest[:8]),
            "messages_per_s": round(self.tap.late_messages / self.tap.late_s) if self.tap.late_s else 0,
            "failed": sum(self.faults.values()),
            "faults": dict(self.faults),
            "fault_example": self.fault_example,
            "requests_per_s_offered": setting.rate,
            "requests_per_s": round((self.after.answered - self.before.answered) / self.seconds, 2),
            "requests": self.after.answered - self.before.answered,
            "unsent": self.after.unsent - self.before.unsent,
            "first_token_ms_p50": _rounded(ttft.p50 if ttft else None),
            "first_token_ms_p99": _rounded(ttft.p99 if ttft else None),
            "scales_per_s_offered": setting.scales,
            "scales_per_s": round((scales["out"] + scales["in"]) / self.seconds, 2),
            "scales": dict(scales),
            "report_late_ms_max": _rounded(1000 * max((fleet.report_late_s for fleet in self.fleets), default=0.0)),
            "formed_s": round(self.formed_s, 1),
        }

    def aims(self) -> dict[str, bool | None]:
        """Whether each is met; None: nothing was measured."""
        document = self.document()
        limits = {
            "pool_cores": MAX_POOL_CORES,
            "heartbeat_ms_p99": MAX_HEARTBEAT_MS,
            "route_ms_p99": MAX_ROUTE_MS,
            "message_bytes_max": MAX_MESSAGE_BYTES,
        }
        return {key: None if document[key] is None else document[key] <= limit for key, limit in limits.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
