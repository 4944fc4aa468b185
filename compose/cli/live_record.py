"""The pairs of a scale operation's record, as lines for people: within 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from shared.messages.scaling import LiveBatchRecord, LiveRecord

COLUMNS = 100
MAX_BATCHES = 12
"""Of a pair, that are shown."""
MAX_BARS = 50
_NAME = 26
_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*%@"


def pair_lines(pairs: Sequence[LiveRecord], *, encoding: str = "utf-8") -> Iterator[str]:
    """Who worked with whom and why, what each side did, and when. ``encoding`` is the terminal's."""
    bars = _BARS if _can(encoding) else _ASCII_BARS
    for number, pair in enumerate(pairs, 1):
        yield ""
        yield f"live {number} of {len(pairs)}: {pair.source} (source) with {pair.target} (target)"
        yield from _row("policy", pair.policy)
        yield from _row("why", pair.why)
        yield from _row("outcome", f"{pair.outcome}: {pair.reason}" if pair.reason else pair.outcome)
        yield from _row("started_ms", shown_ms(pair.started_ms))
        yield from _row("first_cooperative_token_ms", shown_ms(pair.first_cooperative_token_ms))
        yield from _row("ended_ms", shown_ms(pair.ended_ms))
        yield from _batches(pair.batches)
        yield from _timelines(pair, bars)


def _row(name: str, value: str) -> Iterator[str]:
    lines = textwrap.wrap(value, COLUMNS - _NAME - 4) or ["-"]
    for index, line in enumerate(lines):
        yield f"  {'' if index else name:<{_NAME}}  {line}"


def _batches(batches: Sequence[LiveBatchRecord]) -> Iterator[str]:
    yield from _row("batches", str(len(batches)))
    if not batches:
        return
    yield "    batch  requests    tokens  target layers  source layers  first token ms"
    for number, batch in enumerate(batches[:MAX_BATCHES], 1):
        # A batch that ended without a token has none since before the beginning.
        first = shown_ms(batch.first_token_ms if batch.first_token_ms >= 0 else None)
        yield (
            f"    {number:>5}  {batch.num_requests:>8}  {batch.num_tokens:>8}  {batch.target_layers:>13}  "
            f"{batch.source_layers:>13}  {first:>14}"
        )
    if len(batches) > MAX_BATCHES:
        yield f"    and {len(batches) - MAX_BATCHES} more; --json has all"


def _timelines(pair: LiveRecord, bars: str) -> Iterator[str]:
    lanes = {"target layers": pair.target_layers, "source layers": pair.source_layers, "source tokens": pair.tokens}
    if not any(any(lane) for lane in lanes.values()):
        return
    # As many buckets per bar as it takes to stay on the line.
    num_buckets = max(map(len, lanes.values()))
    merged = -(-num_buckets // MAX_BARS)
    sums = {name: _merged(lane + (0,) * (num_buckets - len(lane)), merged) for name, lane in lanes.items()}
    bar_ms = f"{pair.bucket_ms * merged:g} ms"
    layers = max(*sums["target layers"], *sums["source layers"])
    for name, lane in sums.items():
        # Both sides' layers have one scale: what counts is who runs more.
        most = layers if name.endswith("layers") else max(lane)
        yield f"  {name + ' per ' + bar_ms:<{_NAME}}  |{sparkline(lane, most, bars)}| max {most}"


def _merged(counts: Sequence[int], width: int) -> list[int]:
    """Sums of ``width`` neighbours each."""
    return [sum(counts[start : start + width]) for start in range(0, len(counts), width)]


def sparkline(counts: Sequence[int], most: int, bars: str = _BARS) -> str:
    """A character per count, the last of ``bars`` for ``most``; every count above 0 is visible."""
    steps = len(bars) - 1
    return "".join(bars[min(steps, -(-count * steps // most))] if count > 0 else bars[0] for count in counts)


def _can(encoding: str) -> bool:
    try:
        _BARS.encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def shown_ms(value: float | None) -> str:
    """A time; ``-`` for one that is not known."""
    return "-" if value is None else f"{value:.1f}"
