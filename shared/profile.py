"""What one instance of a model can do, measured beforehand by ``blitzscale profile``: the file, and what it says.

JSON, one object (``Profile``). Times are medians, in seconds. A profile is of one model (by the hash of its weights),
one layout, one engine on one device, and one version of the program; of anything else it says nothing. GPUs are one
device where they are one model.

Beside the tables there is a fit of each, for sizes that were not measured:

    decode step   = base + requests · request + tokens of context · context_token
    prefill steps = steps · base + prompt tokens · token + pairs · pair

where a pair is a prompt token and a token that it attends to. A GPU's steps are no such lines: there may be a
``StepFit`` beside them (``shared.step_fit``), which comes nearer. Pure, but for ``read_profile`` and ``write_profile``.

A profile may be derived from figures that others have published (``Derived``): then nothing here has measured it, and
it is the mock engine's.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.errors import BadProfile
from shared.messages.common import KindName
from shared.model_spec import MAX_LAYERS
from shared.step_fit import StepFit

FORMAT: Literal["blitzscale-profile.v1"] = "blitzscale-profile.v1"
MAX_BYTES = 1 << 20
"""Of a file. Ours have a few thousand."""
MAX_POINTS = 1000
"""Of a table."""
MOST_DECODES = 4096
"""Of a step, that are looked at."""
ROUNDING = 1e-3
"""That a fit may differ from its table beyond the error that it states: numbers in files are rounded."""
MUTATION_S = 0.05
"""Assumed: nothing is moved, and the registry has to hear of it."""

LEAST_S = 1e-9
"""No step and no load is quicker, and dividing by less overflows."""

Seconds = Annotated[float, Meta(ge=LEAST_S, le=1e6)]
Share = Annotated[float, Meta(ge=0.0, le=1e6)]
Number = Annotated[int, Meta(ge=1, le=2**40)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
LoadSource = Literal["host", "disk", "peer"]


class PrefillPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that was computed alone, in chunks of ``Profile.chunk_tokens``."""

    prompt_tokens: Number
    seconds: Seconds
    repetitions: Number

    @property
    def tokens_per_s(self) -> float:
        return self.prompt_tokens / self.seconds


class DecodePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A step of requests that decode, each with so many tokens before."""

    num_requests: Number
    context_tokens: Number
    seconds: Seconds
    repetitions: Number


class LoadPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A whole copy, verified. ``host``: out of this machine's memory; ``disk``: with nothing of it in the page cache;
    ``peer``: from another worker."""

    source: LoadSource
    seconds: Seconds
    repetitions: Number


class DecodeFit(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    base_s: Share
    """A step takes ``base_s + requests · request_s + (tokens of all contexts) · context_token_s``."""
    request_s: Share
    context_token_s: Share
    error: Share
    """The largest difference from a measured point, as a share of it."""

    def step_s(self, num_requests: int, context_tokens: int) -> float:
        """Of requests that have ``context_tokens`` together."""
        return self.base_s + num_requests * self.request_s + context_tokens * self.context_token_s


class PrefillFit(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    base_s: Share
    """A prompt takes ``steps · base_s + tokens · token_s + pairs · pair_s``, a pair being a token and one that it
    attends to."""
    token_s: Share
    pair_s: Share
    error: Share
    """As of decode."""


class Derived(msgspec.Struct, frozen=True, kw_only=True):
    """Of a profile that was computed from published figures: from which, and how."""

    source: Name
    """Whose measurements, of which engine."""
    licence: Name
    """Theirs, as an SPDX expression."""
    tool: Name
    """With its version."""
    method: Name
    gpu: Name
    tensor_parallel: Annotated[int, Meta(ge=1, le=1024)]
    """GPUs of an instance. ``weights_bytes`` and ``kv_bytes_per_token`` are of all of them together."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Times are medians. A profile is of one model, layout, engine, device (of GPUs: one model of them) and version of
    the program."""

    format: Literal["blitzscale-profile.v1"] = FORMAT
    version: Name
    """Of the program that measured."""
    measured_at_s: Annotated[float, Meta(ge=0.0, le=1e11)]
    """Unix time."""
    model: Name
    """A name for people."""
    model_hash: Name
    layout_hash: Name
    engine: KindName
    device: KindName
    num_threads: Number
    num_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    weights_bytes: Number
    kv_bytes_per_token: Number
    chunk_tokens: Number
    """In chunks of so many tokens prompts were computed."""
    prefill: Annotated[tuple[PrefillPoint, ...], Meta(min_length=1, max_length=MAX_POINTS)]
    """By length, rising."""
    decode: Annotated[tuple[DecodePoint, ...], Meta(min_length=1, max_length=MAX_POINTS)]
    load: Annotated[tuple[LoadPoint, ...], Meta(max_length=10)] = ()
    mutation_s: Seconds = MUTATION_S
    """To give an instance another role: as the stack at ``--url`` recorded it, else assumed."""
    mutation_is_measured: bool = False
    decode_fit: DecodeFit
    prefill_fit: PrefillFit
    step_fit: StepFit | None = None
    """Nearer than the two fits where steps are no line, as a GPU's."""
    derived: Derived | None = None
    """Computed from published figures; null: measured here."""
    gpu_name: Annotated[str, Meta(max_length=512)] = ""
    """The model of GPU that it was measured on, as NVML names it. Empty: none."""

    def __post_init__(self) -> None:
        lengths = [point.prompt_tokens for point in self.prefill]
        if any(a >= b for a, b in pairwise(lengths)):
            raise ValueError(f"prefill: lengths must rise, not {lengths}")
        if len({point.source for point in self.load}) < len(self.load):
            raise ValueError("load: a source is there twice")
        if not (self.prefill_fit.base_s or self.prefill_fit.token_s) or not self.decode_fit.step_s(1, 1):
            raise ValueError("the fit says that steps take no time")
        if self.step_fit is not None:
            self._check_step_fit(self.step_fit)
        if self.derived is not None:
            self._check_derived()

    def _check_step_fit(self, fit: StepFit) -> None:
        """Against the tables, in this file, that it was made from."""
        expected = [
            (f"a prompt of {point.prompt_tokens} tokens", self._prompt_s(fit, point.prompt_tokens), point.seconds)
            for point in self.prefill
        ]
        for step in self.decode:
            count, context = step.num_requests, step.context_tokens
            what = f"a step of {count} requests with {context} tokens each"
            expected.append((what, fit.step_s(0, 0, count, count * context), step.seconds))
        for what, seconds, measured_s in expected:
            if not abs(seconds - measured_s) <= (fit.error + ROUNDING) * measured_s:
                raise ValueError(
                    f"step_fit: {what} takes {seconds:.6g} s, and {measured_s:.6g} s in the table: "
                    f"further apart than {fit.error:.1%}"
                )

    def _prompt_s(self, fit: StepFit, prompt_tokens: int) -> float:
        """Alone, in chunks. Whole chunks are taken together: what they attend to lies on a line."""
        whole, rest = divmod(prompt_tokens, self.chunk_tokens)
        seconds = 0.0
        if whole:
            end = whole * self.chunk_tokens
            seconds = whole * fit.step_s(self.chunk_tokens, 0, 0, 0) + end * (end + 1) // 2 * fit.pair_s
        if rest:
            pairs = rest * (prompt_tokens - rest) + rest * (rest + 1) // 2
            seconds += fit.step_s(rest, pairs, 0, 0)
        return seconds

    def _check_derived(self) -> None:
        if self.engine != "mock":
            raise ValueError(f"derived: no engine here was measured, and yet the file says {self.engine}")
        if self.kv_bytes_per_token % self.num_layers:
            raise ValueError(f"derived: KV of {self.kv_bytes_per_token} bytes is not of {self.num_layers} equal layers")
        if any(a.seconds > b.seconds for a, b in pairwise(self.prefill)):
            raise ValueError("derived: a longer prompt takes less time")
        steps = {(step.num_requests, step.context_tokens): step.seconds for step in self.decode}
        if len(steps) < len(self.decode):
            raise ValueError("derived: a decode step is there twice")
        for (count, context), (other, longer) in pairwise(sorted(steps)):
            if count == other and steps[count, context] > steps[count, longer]:
                raise ValueError(f"derived: {count} requests decode faster with {longer} tokens than with {context}")

    def prefill_tokens_per_s(self, prompt_tokens: float) -> float:
        """Of prompts of that length: between two that were measured, their times on a line; outside, the nearest
        one's speed."""
        points = self.prefill
        at = bisect_left([point.prompt_tokens for point in points], prompt_tokens)
        if at in (0, len(points)):
            return points[min(at, len(points) - 1)].tokens_per_s
        low, high = points[at - 1], points[at]
        share = (prompt_tokens - low.prompt_tokens) / (high.prompt_tokens - low.prompt_tokens)
        return prompt_tokens / (low.seconds + share * (high.seconds - low.seconds))

    def step_s(self, prompt_tokens: int, pairs: int, num_decodes: int, context_tokens: int) -> float:
        """A step with both: the weights are read once. ``context_tokens``: of the requests that decode."""
        if self.step_fit is not None:
            return self.step_fit.step_s(prompt_tokens, pairs, num_decodes, context_tokens)
        prefill, decode = self.prefill_fit, self.decode_fit
        base_s = max(prefill.base_s if prompt_tokens else 0.0, decode.base_s if num_decodes else 0.0)
        prompts_s = prompt_tokens * prefill.token_s + pairs * prefill.pair_s
        return base_s + prompts_s + num_decodes * decode.request_s + context_tokens * decode.context_token_s

    def decode_line(self, context_tokens: float, within_s: float) -> tuple[float, float]:
        """Seconds of a step that only decodes requests with so many tokens each, as (base, each request). Where steps
        are no line: the one through one request and through the most that a step takes ``within_s``."""
        if self.step_fit is None:
            fit = self.decode_fit
            return fit.base_s, fit.request_s + context_tokens * fit.context_token_s
        step_fit = self.step_fit

        def seconds(count: int) -> float:
            return step_fit.step_s(0, 0, count, count * context_tokens)

        most = max(2, bisect_right(range(MOST_DECODES), within_s, key=seconds) - 1)
        request_s = (seconds(most) - seconds(1)) / (most - 1)
        return max(0.0, seconds(1) - request_s), request_s

    @property
    def load_s(self) -> float:
        """To fetch the model again, from where it is when no instance of it runs: a host's memory, if the time from
        there is known. 0: no time is."""
        by_source = {point.source: point.seconds for point in self.load}
        return next((by_source[source] for source in ("host", "peer", "disk") if source in by_source), 0.0)

    @property
    def of_gpu(self) -> str:
        """The model of GPU that it is of, measured or derived. Empty: of none."""
        return self.gpu_name or (self.derived.gpu if self.derived is not None else "")

    def fits(self, engine: str, device: str) -> bool:
        """Whether it says something about instances there. The mock engine plays whatever was profiled."""
        return engine == "mock" or (self.engine, self.device) == (engine, device)

    def _fits_gpu(self, engine: str, device: str, gpu_name: str | None) -> bool:
        """Of a GPU, where it says of which it is. The mock engine has none; it may stand for one."""
        if engine == "mock":
            return gpu_name in (None, "", self.of_gpu)
        return device != "cuda" or (self.gpu_name != "" and gpu_name in (None, self.gpu_name))

    def check(
        self,
        *,
        model_hash: str = "",
        layout_hash: str = "",
        engine: str = "",
        device: str = "cpu",
        gpu_name: str | None = None,
    ) -> None:
        """Raises ``BadProfile`` unless it is of that and of this version of the program. Empty: any, but of the GPU:
        there None is any, and empty one that is not known."""
        differs = [
            f"{what} {ours} is there, the profile is of {of}"
            for what, ours, of in (
                ("model", model_hash, self.model_hash),
                ("layout", layout_hash, self.layout_hash),
                ("version", program_version(), self.version),
            )
            if ours not in ("", of)
        ]
        if engine and not self.fits(engine, device):
            differs.append(f"engine {engine} on {device} is there, the profile is of {self.engine} on {self.device}")
        elif engine and not self._fits_gpu(engine, device, gpu_name):
            there = "a GPU" if gpu_name is None else gpu_name or "a GPU whose name is not known"
            differs.append(f"{there} is there, the profile is of {self.of_gpu or 'a GPU that it does not name'}")
        if differs:
            raise BadProfile(f"the profile of {self.model} does not fit: {'; '.join(differs)}; measure it again")


@cache
def program_version() -> str:
    """Of this program, as installed."""
    try:
        return version("blitzscale")
    except PackageNotFoundError:
        return "unknown"


def read_profile(file: Path) -> Profile:
    """Raises ``BadProfile`` with the file and what is wrong with it."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadProfile(f"{file}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise BadProfile(f"{file}: larger than {MAX_BYTES} bytes, which no profile is")
    try:
        return msgspec.json.decode(data, type=Profile)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadProfile(f"{file}: not a {FORMAT}: {error}") from error


def write_profile(file: Path, profile: Profile) -> None:
    """Whole or not at all. Raises ``OSError``."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        aside.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
