"""The result of an evaluation: as JSON, as a table, and the replays that a report shows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.table import Table

from bench.evaluate.figures import Figures, Interval, Judged, figures, intervals, medians
from bench.evaluate.measure import Outcome, Setting
from bench.lab.played import Played
from bench.replay.document import Document
from bench.sim.tables import in_ms, in_percent, table_of_systems


class Summed(msgspec.Struct, frozen=True, kw_only=True):
    """Of a system: medians over repetitions, with intervals, and each repetition; those without a void run."""

    medians: Figures | None
    """None: no repetition counts."""
    intervals: dict[str, Interval]
    repetitions: tuple[Figures, ...]
    void: int
    """Runs that do not count: none of their repetitions is in these figures."""

    @classmethod
    def of(cls, repetitions: Sequence[Sequence[Judged]], *, seed: int, num_gpus: int) -> Summed:
        """``repetitions``: the runs of each, which are pooled."""
        counting = [judged for judged in repetitions if not any(one.is_void for one in judged)]
        each = tuple(figures(judged, num_gpus=num_gpus) for judged in counting)
        return cls(
            medians=medians(each) if each else None,
            intervals=intervals([one for judged in counting for one in judged], seed=seed),
            repetitions=each,
            void=sum(one.is_void for judged in repetitions for one in judged),
        )

    def flat(self) -> dict[str, Any]:
        """The medians are keys of the whole; null where no repetition counts."""
        rest = {name: getattr(self, name) for name in ("intervals", "repetitions", "void")}
        nothing = dict.fromkeys(Figures.__struct_fields__)
        return (nothing if self.medians is None else msgspec.structs.asdict(self.medians)) | rest


class Summary:
    """Of all systems, pooled over the windows and by window."""

    def __init__(self, setting: Setting, outcome: Outcome, played: Played) -> None:
        self._setting = setting
        self._outcome = outcome
        self._played = played
        self._names = [system.name for system in setting.systems]
        windows = range(len(setting.windows.measured))
        self.pooled = {name: self._summed(name, windows) for name in self._names}
        self.by_window = [{name: self._summed(name, [window]) for name in self._names} for window in windows]

    def _judged(self, name: str, repetition: int, window: int) -> Judged:
        return self._outcome.judged(repetition, window, name, self._setting.model)

    def _summed(self, name: str, windows: Sequence[int]) -> Summed:
        of = [[self._judged(name, r, window) for window in windows] for r in range(self._setting.repetitions)]
        return Summed.of(of, seed=self._setting.seed, num_gpus=self._setting.model.num_gpus)

    def document(self) -> dict[str, Any]:
        """As JSON shows it."""
        setting, found = self._setting, self._outcome.found
        measured = zip(setting.windows.measured, self.by_window, strict=True)
        return {
            "trace": setting.trace.name,
            "skipped_rows": setting.trace.skipped_rows,
            "spread_seconds": setting.spread_seconds,
            "model": setting.model.name,
            "seed": setting.seed,
            "repetitions": setting.repetitions,
            "workers": setting.workers,
            "lab": msgspec.to_builtins(self._played) | {"nic_gbps": setting.nic_gbps},
            "slo": {"ttft_s": setting.model.slo.ttft_s, "tbt_s": setting.model.slo.tbt_s},
            "search": found,
            "tuning_window": setting.windows.tuning,
            "systems": {name: summed.flat() for name, summed in self.pooled.items()},
            "windows": [
                {
                    "start_s": window.start_s,
                    "seconds": window.seconds,
                    "systems": {name: one.flat() for name, one in summed.items()},
                }
                for window, summed in measured
            ],
            "runs": self._runs(),
        }

    def _runs(self) -> list[dict[str, Any]]:
        """What each run was disturbed by."""
        return [
            {
                "name": run.plan.name,
                "instances": run.plan.instances,
                "attempts": run.attempts,
                "void": run.document.void,
                "conditions": run.conditions,
                "send_lag_p99_s": run.document.result.send_lag_s.p99 if run.document.result.send_lag_s else None,
            }
            for windows in self._outcome.runs
            for runs in windows
            for run in runs.values()
        ]

    def table(self) -> Table:
        """The pooled figures, as the simulator shows its own; ``void``: runs that do not count, nor do their
        repetitions."""
        shown = table_of_systems(
            self._title(), ("TTFT", "p99", "TBT", "p99", "5x", "abs.", "GPU s", "host", "lost", "void")
        )
        for name, summed in self.pooled.items():
            one = summed.medians
            if one is None:
                shown.add_row(name, *["-"] * 9, f"{summed.void}")
                continue
            shown.add_row(
                name,
                in_ms(one.ttft_mean_s),
                in_ms(one.ttft_p99_s),
                in_ms(one.tbt_mean_s),
                in_ms(one.tbt_p99_s),
                in_percent(one.slo_attainment),
                in_percent(one.slo_attainment_absolute),
                f"{one.gpu_seconds:.0f}",
                "-" if one.host_copies_max is None else f"{one.host_copies_max:.1f}",
                f"{one.failed}",
                f"{summed.void}",
            )
        return shown

    def _title(self) -> str:
        setting = self._setting
        num_requests = max((s.medians.requests for s in self.pooled.values() if s.medians is not None), default=0)
        return (
            f"{setting.trace.name}, {setting.model.name}: {num_requests:,} requests in {len(self.by_window)} windows, "
            f"{setting.repetitions} repetitions, {self._outcome.found.scale_rate:.3g} times the rate; ms and % in SLO"
        )

    def replays(self) -> list[Document]:
        """Of the first repetition, judged by its relative objectives, for a report."""
        found = []
        for number, window in enumerate(self._setting.windows.measured):
            for name in self._names:
                one = self._judged(name, 0, number)
                document = one.run.document.judged_by(one.relative or one.absolute)
                label = name if len(self.by_window) == 1 else f"{name}, {window.start_s:g} s"
                found.append(msgspec.structs.replace(document, label=label))
        return found
