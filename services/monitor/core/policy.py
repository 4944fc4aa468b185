"""The knobs of the monitor's formulas and of their use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemandPolicy:
    """The same for all models."""

    rate_window_s: float = 1.0
    down_window_s: float = 60.0
    """How long an instance that is not needed is kept, if no other model wants its worker; 0: for as long as fetching
    it again would cost. What real traces need comes back within a minute (``docs/decisions/0030``)."""
    assumed_load_s: float = 1.0
    """Until an instance said how long it took to load."""
    slack_s: float = 0.5
    """Within how long a backlog should be drained, where the model has no TTFT objective."""
    prefill_tokens_per_s: float = 0.0
    """Of one instance of a model without a profile; 0 takes what instances report."""
    assumed_tokens_per_s: float = 2000.0
    """Until something was reported."""
    assumed_output_tokens: float = 128.0
    """Of a request, until one has ended."""
    utilisation: float = 0.9
    kv_upper_bound: float = 0.9
    running_limit: int = 0
    """Running requests one instance should have at most; 0 leaves it to KV and the TBT objective."""
    prescale: bool = True
    """Whether a marked rise of what prefill needs raises decode at once."""
    down_headroom: float = 0.8
    """Scale in only if the window's load fits this share of the remaining instances."""
    report_ttl_s: float = 2.0
    """A report older than this comes from something dead."""
