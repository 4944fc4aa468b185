"""The file that ``blitzscale profile`` writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadProfile
from shared.profile import MAX_BYTES, DecodePoint, Derived, PrefillPoint, Profile, read_profile, write_profile
from shared.step_fit import DensePoint, StepFit
from tests.records import profile


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    write_profile(file, profile())
    assert read_profile(file) == profile()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.json"]


def test_speed_between_two_lengths_lies_on_the_line_of_their_times() -> None:
    measured = profile()
    assert measured.prefill_tokens_per_s(0) == measured.prefill_tokens_per_s(100) == pytest.approx(1000.0)
    assert measured.prefill_tokens_per_s(550) == pytest.approx(550 / 1.05)
    assert measured.prefill_tokens_per_s(1000) == measured.prefill_tokens_per_s(1e9) == pytest.approx(500.0)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e6)), min_size=1, max_size=8), st.floats(0, 1e12))
def test_speed_is_a_number_at_any_length(points: list[tuple[int, float]], prompt_tokens: float) -> None:
    rising = sorted(dict(points).items())
    measured = profile(prefill=tuple(PrefillPoint(prompt_tokens=n, seconds=s, repetitions=1) for n, s in rising))
    assert 0 < measured.prefill_tokens_per_s(prompt_tokens) < 1e13


def test_a_step_with_prompts_and_decodes_reads_the_weights_once() -> None:
    alone = profile().step_s(0, 0, 8, 800)
    assert alone == pytest.approx(0.01 + 8 * 0.001 + 800 * 0.00001)
    assert profile().step_s(100, 5000, 8, 800) == pytest.approx(alone + 100 * 0.0008 + 5000 * 0.000001)


def test_a_load_comes_from_the_nearest_source_that_was_measured() -> None:
    assert profile().load_s == 0.5
    assert profile(load=profile().load[:1]).load_s == 4.0
    assert profile(load=()).load_s == 0.0


def _document(**changes: object) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(profile()) | changes)


FIT = msgspec.to_builtins(profile().decode_fit)
POINT = msgspec.to_builtins(profile().prefill[0])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b"\xff\xfe",
        b" " * (MAX_BYTES + 1),
        _document(format="blitzscale-profile.v2"),
        _document(prefill=[]),
        _document(prefill=[POINT, POINT]),
        _document(prefill=[POINT | {"prompt_tokens": i + 1} for i in range(1001)]),
        _document(prefill=[POINT | {"seconds": 0}]),
        _document(prefill=[POINT | {"seconds": -1.0}]),
        _document(prefill=[POINT | {"seconds": 5e-324}]),
        _document(prefill=[POINT | {"prompt_tokens": 10**30}]),
        _document(prefill=[POINT | {"prompt_tokens": 0}]),
        _document(decode_fit=FIT | {"request_s": 1e300}),
        _document(decode_fit=FIT | {"request_s": None}),
        _document(decode_fit=FIT | {"base_s": 0, "request_s": 0, "context_token_s": 0}),
        _document(load=[{"source": "disk", "seconds": 1.0, "repetitions": 1}] * 2),
        _document(model_hash="x" * 10_000),
        _document(num_layers=10**9),
        _document().replace(b'"mutation_s":0.05', b'"mutation_s":NaN'),
        _document().replace(b'"mutation_s":0.05', b'"mutation_s":1e999'),
    ],
)
def test_what_is_no_profile_is_refused_with_the_files_name(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "hostile.json"
    file.write_bytes(data)
    with pytest.raises(BadProfile, match=r"hostile\.json"):
        read_profile(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadProfile, match="cannot be read"):
        read_profile(tmp_path / "none.json")


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    file.write_bytes(_document(added_later=[1, 2]))
    assert read_profile(file) == profile()


@pytest.mark.parametrize(
    ("changes", "there", "said"),
    [
        ({}, {"model_hash": "another"}, "model another"),
        ({}, {"layout_hash": "another"}, "layout another"),
        ({}, {"engine": "torch", "device": "cuda"}, "engine torch on cuda"),
        ({"engine": "mock"}, {"engine": "torch"}, "engine torch on cpu"),
        ({"version": "0.0.1"}, {}, "is of 0.0.1"),
    ],
)
def test_a_profile_of_something_else_is_refused(changes: dict[str, object], there: dict[str, str], said: str) -> None:
    with pytest.raises(BadProfile, match=said):
        profile(**changes).check(**there)


H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("of_gpu", "gpu_name", "said"),
    [
        (A100, H100, f"{H100} is there, the profile is of {A100}"),
        ("", H100, f"{H100} is there, the profile is of a GPU that it does not name"),
        (A100, "", f"a GPU whose name is not known is there, the profile is of {A100}"),
        ("", "", "a GPU whose name is not known is there, the profile is of a GPU that it does not name"),
        ("", None, "a GPU is there, the profile is of a GPU that it does not name"),
    ],
)
def test_a_profile_of_a_gpu_is_of_one_model_of_them(of_gpu: str, gpu_name: str | None, said: str) -> None:
    with pytest.raises(BadProfile, match=re.escape(said)):
        profile(device="cuda", gpu_name=of_gpu).check(engine="torch", device="cuda", gpu_name=gpu_name)


def test_a_profile_of_the_same_gpu_is_taken() -> None:
    profile(device="cuda", gpu_name=H100).check(engine="torch", device="cuda", gpu_name=H100)
    profile(device="cuda", gpu_name=H100).check(engine="torch", device="cuda")
    profile().check(engine="torch", device="cpu", gpu_name="")


def test_the_mock_engine_may_stand_for_a_gpu() -> None:
    of_h100 = profile(device="cuda", gpu_name=H100)
    of_h100.check(engine="mock", device="cuda", gpu_name="")
    of_h100.check(engine="mock", device="cuda", gpu_name=H100)
    with pytest.raises(BadProfile, match=f"{A100} is there, the profile is of {H100}"):
        of_h100.check(engine="mock", device="cuda", gpu_name=A100)
    derived = _gpu()
    assert derived.derived is not None
    derived.check(engine="mock", device="cuda", gpu_name=derived.derived.gpu)
    with pytest.raises(BadProfile, match="the profile is of"):
        derived.check(engine="mock", device="cuda", gpu_name=H100)


def test_the_mock_engine_plays_any_profile() -> None:
    own: Profile = profile()
    own.check(model_hash=own.model_hash, layout_hash=own.layout_hash, engine="mock", device="cpu")


def _gpu(**changes: object) -> Profile:
    """A derived profile whose tables are what its fit of steps says."""
    fit = StepFit(
        dense=(DensePoint(num_tokens=1, seconds=0.01), DensePoint(num_tokens=1000, seconds=0.1)),
        prompts_s=0.001,
        prompt_token_s=0.00001,
        pair_s=0.0000001,
        decodes_s=0.002,
        request_s=0.0001,
        context_token_s=0.000001,
        error=0.01,
    )
    lengths, steps = (100, 1000), ((1, 100), (1, 1000), (64, 1000))
    fields: dict[str, object] = {
        "engine": "mock",
        "chunk_tokens": 1000,
        "prefill": tuple(
            PrefillPoint(prompt_tokens=n, seconds=fit.step_s(n, n * (n + 1) // 2, 0, 0), repetitions=1) for n in lengths
        ),
        "decode": tuple(
            DecodePoint(num_requests=b, context_tokens=c, seconds=fit.step_s(0, 0, b, b * c), repetitions=1)
            for b, c in steps
        ),
        "step_fit": fit,
        "derived": Derived(
            source="elsewhere", licence="Apache-2.0", tool="a tool 1", method="by hand", gpu="A100", tensor_parallel=1
        ),
    }
    return profile(**(fields | changes))


def test_where_steps_are_no_line_their_own_fit_counts() -> None:
    measured = _gpu()
    assert measured.step_fit is not None
    assert measured.step_s(100, 5050, 8, 800) == measured.step_fit.step_s(100, 5050, 8, 800)
    assert measured.step_s(100, 5050, 8, 800) != profile().step_s(100, 5050, 8, 800)


def test_decodes_are_a_line_up_to_what_is_allowed_for_them() -> None:
    assert profile().decode_line(100, 1.0) == pytest.approx((0.01, 0.002))
    measured = _gpu()
    for within_s in (0.02, 0.05, 0.3):
        base_s, request_s = measured.decode_line(1000, within_s)
        assert base_s + request_s == pytest.approx(measured.step_s(0, 0, 1, 1000))
        most = int((within_s - base_s) / request_s)
        assert measured.step_s(0, 0, most, most * 1000) <= within_s < measured.step_s(0, 0, most + 1, (most + 1) * 1000)
    assert all(cost >= 0 for within_s in (0.0, 1e9) for cost in measured.decode_line(1000, within_s))


def test_a_derived_profile_is_the_mock_engines(tmp_path: Path) -> None:
    derived = _gpu()
    write_profile(tmp_path / "gpu.json", derived)
    assert read_profile(tmp_path / "gpu.json") == derived
    assert derived.fits("mock", "cpu")
    assert not derived.fits("torch", "cuda")


def _change(document: dict[str, Any], table: str, index: int, **values: object) -> None:
    document[table][index] |= values


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda d: d.update(engine="torch", device="cuda"), "no engine here was measured"),
        (lambda d: d.update(kv_bytes_per_token=1025, num_layers=2), "equal layers"),
        (lambda d: (d.update(step_fit=None), _change(d, "prefill", 1, seconds=0.001)), "a longer prompt takes less"),
        (lambda d: (d.update(step_fit=None), _change(d, "decode", 1, seconds=0.001)), "faster with 1000 tokens"),
        (lambda d: d["decode"].append(d["decode"][0]), "is there twice"),
        (lambda d: _change(d, "decode", 0, seconds=0.5), "further apart than 1.0%"),
        (lambda d: d.update(chunk_tokens=10), "a prompt of 100 tokens takes"),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(
    spoil: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    document = msgspec.json.decode(msgspec.json.encode(_gpu()))
    spoil(document)
    file = tmp_path / "wrong.json"
    file.write_bytes(msgspec.json.encode(document))
    with pytest.raises(BadProfile, match=said):
        read_profile(file)


@pytest.mark.parametrize("chunk_tokens", [100, 300, 1000, 5000])
def test_a_prompt_in_chunks_is_the_sum_of_its_steps(chunk_tokens: int) -> None:
    fit = _gpu().step_fit
    assert fit is not None
    seconds, start = 0.0, 0
    while start < 1000:
        count = min(chunk_tokens, 1000 - start)
        seconds += fit.step_s(count, count * start + count * (count + 1) // 2, 0, 0)
        start += count
    point = PrefillPoint(prompt_tokens=1000, seconds=seconds, repetitions=1)
    assert _gpu(prefill=(point,), chunk_tokens=chunk_tokens).prefill == (point,)
