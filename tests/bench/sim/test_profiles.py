"""The profiles of GPUs that are kept beside the simulator."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.sim.architectures import CONFIGS, num_parameters, weights_bytes
from bench.sim.make_profiles import CASES, KV_SHARE, MEMORY_BYTES, PROFILES, Case
from shared.models.families import parse_config
from shared.profile import Profile, read_profile

PARAMETERS = {"llama-3-8b": 8_030_261_248, "mistral-24b": 23_572_403_200, "qwen2.5-72b": 72_706_203_648}
"""As the models' safetensors indexes say."""
KV_BYTES_PER_TOKEN = {"llama-3-8b": 131_072, "mistral-24b": 163_840, "qwen2.5-72b": 327_680}
PEAK_FLOPS = {"a100": 312e12, "h100": 989e12}
PEAK_BYTES_PER_S = {"a100": 2.039e12, "h100": 3.35e12}

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def _read(case: Case) -> Profile:
    return read_profile(PROFILES / f"{case.name}.json")


def test_there_is_one_of_each_case_and_no_other() -> None:
    assert {file.name for file in PROFILES.iterdir()} == {f"{case.name}.json" for case in CASES}


@pytest.mark.parametrize("model", CONFIGS)
def test_architectures_have_the_published_sizes(model: str) -> None:
    spec = parse_config(CONFIGS[model])
    assert num_parameters(spec) == PARAMETERS[model]
    assert spec.kv_bytes_per_token == KV_BYTES_PER_TOKEN[model]


@cases
def test_it_says_of_what_it_is_and_where_from(case: Case) -> None:
    profile, spec = _read(case), parse_config(CONFIGS[case.model])
    assert (profile.model, profile.num_layers) == (case.model, spec.num_layers)
    assert (profile.weights_bytes, profile.kv_bytes_per_token) == (weights_bytes(spec), spec.kv_bytes_per_token)
    derived = profile.derived
    assert derived is not None
    assert (derived.licence, derived.tensor_parallel) == ("Apache-2.0", case.tensor_parallel)
    assert case.gpu.upper() in derived.gpu
    assert case.system in derived.source
    assert not profile.fits("torch", "cuda")


@cases
def test_longer_prompts_and_contexts_take_longer(case: Case) -> None:
    profile = _read(case)
    assert all(a.seconds <= b.seconds for a, b in pairwise(profile.prefill))
    steps = {(step.num_requests, step.context_tokens): step.seconds for step in profile.decode}
    for (count, context), seconds in steps.items():
        assert all(s >= seconds for (b, c), s in steps.items() if b == count and c > context)
        # A larger batch may meet a faster kernel.
        assert all(s >= 0.92 * seconds for (b, c), s in steps.items() if b > count and c == context)


@cases
def test_its_fits_err_as_much_as_they_say(case: Case) -> None:
    profile = _read(case)
    decode, prefill = profile.decode_fit, profile.prefill_fit
    for step in profile.decode:
        seconds = decode.step_s(step.num_requests, step.num_requests * step.context_tokens)
        assert abs(seconds - step.seconds) <= (decode.error + 1e-6) * step.seconds
    for point in profile.prefill:
        n = point.prompt_tokens
        seconds = prefill.base_s + n * prefill.token_s + n * (n + 1) // 2 * prefill.pair_s
        assert abs(seconds - point.seconds) <= (prefill.error + 1e-6) * point.seconds


@cases
def test_steps_come_within_a_few_percent(case: Case) -> None:
    profile = _read(case)
    for point in profile.prefill:
        n = point.prompt_tokens
        assert profile.step_s(n, n * (n + 1) // 2, 0, 0) == pytest.approx(point.seconds, rel=0.035)
    errors = sorted(
        abs(profile.step_s(0, 0, step.num_requests, step.num_requests * step.context_tokens) / step.seconds - 1)
        for step in profile.decode
    )
    assert errors[len(errors) // 2] <= 0.02
    assert errors[len(errors) * 9 // 10] <= 0.065
    assert errors[-1] <= 0.11


@cases
def test_nothing_is_faster_than_the_hardware(case: Case) -> None:
    """Arithmetic of the layers for prompts; bytes of weights and KV for decodes."""
    profile, spec = _read(case), parse_config(CONFIGS[case.model])
    embeddings = spec.vocab_size * spec.hidden_size
    in_layers = num_parameters(spec) - 2 * embeddings
    for point in profile.prefill:
        n = point.prompt_tokens
        flops = 2 * in_layers * n + 2 * n * (n + 1) * spec.num_layers * spec.num_heads * spec.head_dim
        assert point.seconds > flops / PEAK_FLOPS[case.gpu] / case.tensor_parallel
        assert point.seconds < 10 * flops / PEAK_FLOPS[case.gpu] / case.tensor_parallel or n < 512
    for step in profile.decode:
        read_bytes = profile.weights_bytes - 2 * embeddings
        read_bytes += step.num_requests * step.context_tokens * profile.kv_bytes_per_token
        assert step.seconds > read_bytes / PEAK_BYTES_PER_S[case.gpu] / case.tensor_parallel


@cases
def test_what_was_looked_at_fits_into_memory(case: Case) -> None:
    profile = _read(case)
    most = max(step.num_requests * step.context_tokens for step in profile.decode)
    memory = KV_SHARE * MEMORY_BYTES * case.tensor_parallel
    assert profile.weights_bytes + most * profile.kv_bytes_per_token <= memory
