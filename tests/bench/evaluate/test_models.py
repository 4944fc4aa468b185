from __future__ import annotations

import pytest

from bench.evaluate.models import MODELS, find_model
from shared.errors import BadRequest


@pytest.mark.parametrize("name", MODELS)
def test_each_model_has_the_profile_of_its_instances(name: str) -> None:
    model = find_model(name)
    derived = model.profile().derived
    assert derived is not None
    assert derived.tensor_parallel == model.num_gpus
    assert model.profile().model == model.architecture


def test_an_unknown_model_is_named_with_those_that_there_are() -> None:
    with pytest.raises(BadRequest, match=r"qwen2\.5-72b"):
        find_model("llama")
