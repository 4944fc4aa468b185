from __future__ import annotations

import pytest

from bench.evaluate.models import MODELS, find_model
from bench.sim.models import known_model
from shared.errors import BadRequest


@pytest.mark.parametrize("name", MODELS)
def test_each_model_has_the_profile_of_its_instances(name: str) -> None:
    model = find_model(name)
    derived = model.profile().derived
    assert derived is not None
    assert derived.tensor_parallel == model.num_gpus
    assert model.profile().model == model.architecture


@pytest.mark.parametrize("name", MODELS)
def test_the_lab_and_the_simulator_judge_by_the_same_objectives(name: str) -> None:
    model, simulated = find_model(name), known_model(name, "a100")
    assert (model.slo.ttft_s, model.slo.tbt_s) == (simulated.slo_ttft_s, simulated.slo_tbt_s)
    assert model.num_gpus == simulated.degree


def test_an_unknown_model_is_named_with_those_that_there_are() -> None:
    with pytest.raises(BadRequest, match=r"qwen2\.5-72b"):
        find_model("llama")
