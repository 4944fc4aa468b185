"""What the pool that leads shows of instances and GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.pool.core.gpu_time import GpuTime


class GpuMetrics(Collector):
    """Read in threads of their own."""

    def __init__(self, gpu_hour_cost: float) -> None:
        """``gpu_hour_cost``: 0, none is shown."""
        self._gpu_hour_cost = gpu_hour_cost
        self.gpu_time: GpuTime | None = None
        """Of this process, while it leads: another one then counts from nothing."""

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not looked up before there are values."""
        return ()

    def collect(self) -> Iterable[Metric]:
        if self._gpu_hour_cost:
            yield GaugeMetricFamily(
                "blitz_gpu_hour_cost", "What an hour of a GPU costs (BLITZ_POOL_GPU_HOUR_COST).", self._gpu_hour_cost
            )
        gpu_time = self.gpu_time
        if gpu_time is None:
            return
        instances = GaugeMetricFamily(
            "blitz_instances",
            "Instances of each model; model_name is empty for those whose model is not registered.",
            labels=["model_name", "role", "state"],
        )
        for (name, role, state), number in sorted(gpu_time.instances.items()):
            instances.add_metric([name, role, state], number)
        yield instances
        least = GaugeMetricFamily(
            "blitz_min_instances",
            "Instances below which a model is not to go, of each role that it is served by.",
            labels=["model_name", "role"],
        )
        for key, number in sorted(gpu_time.least.items()):
            least.add_metric(list(key), number)
        yield least
        seconds = CounterMetricFamily(
            "blitz_gpu_seconds",
            "Time of the living workers' GPUs, by the model and the state of the instance there; without one, "
            "model_name is empty and state idle. A worker is one GPU. Together they are all workers' time; a pool that "
            "begins to lead counts from 0.",
            labels=["model_name", "state"],
        )
        for of, value_s in sorted(gpu_time.seconds.items()):
            seconds.add_metric(list(of), value_s)
        yield seconds
