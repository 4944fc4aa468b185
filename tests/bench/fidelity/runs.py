"""Figures of runs, made up."""

from __future__ import annotations

from bench.fidelity.condensed import Event, Figures


def figures(ttft_s: tuple[float | None, ...], *, gpu_seconds: float = 100.0, took_s: float | None = 1.0) -> Figures:
    """With one scale-out."""
    event = Event(at_s=1.0, direction="out", role="prefill", desired=2, took_s=took_s)
    return Figures(
        ttft_s=ttft_s,
        mean_gap_s=(None,) * len(ttft_s),
        tbt_mean_s=0.02,
        tbt_p99_s=0.03,
        gpu_seconds=gpu_seconds,
        failed=0,
        events=(event,),
    )
