from __future__ import annotations

from pathlib import Path

import pytest

from bench.evaluate.models import MODELS, find_model
from bench.lab.played import PAPER_NIC_GBPS, Played, make_played
from shared.checkpoint import inspect_checkpoint
from shared.profile_directory import ProfileDirectory

NIC_GBPS = 0.25


def _played(name: str) -> Played:
    model = find_model(name)
    return Played.of(model.profile(), hidden_size=model.hidden_size, num_gpus=model.num_gpus, nic_gbps=NIC_GBPS)


@pytest.mark.parametrize("name", MODELS)
def test_kv_takes_as_long_as_in_the_cluster(name: str) -> None:
    model, played = find_model(name), _played(name)
    small = 2 * 2 * played.num_layers * played.head_dim
    there_s = model.profile().kv_bytes_per_token * 8 / (PAPER_NIC_GBPS * model.num_gpus * 1e9)
    assert small * 8 / (NIC_GBPS * 1e9) == pytest.approx(there_s, rel=0.06)
    assert played.num_layers <= model.profile().num_layers


def test_the_checkpoint_is_as_much_smaller_and_its_profile_has_the_times(tmp_path: Path) -> None:
    profile, played = find_model("llama3-8b").profile(), _played("llama3-8b")
    made = make_played(played, profile, tmp_path, context_tokens=16384)
    assert made.weights_bytes == pytest.approx(profile.weights_bytes / played.factor, rel=0.005)
    assert made.kv_bytes_per_token == 4 * played.num_layers * played.head_dim
    directory = ProfileDirectory(made.profiles)
    directory.look()
    checkpoint = inspect_checkpoint(made.checkpoint)
    found = directory.find(
        model_hash=checkpoint.model_hash, layout_hash=checkpoint.layout.hash, engine="mock", device="cpu"
    )
    assert found is not None
    assert found.step_s(2048, 2_000_000, 3, 900) == profile.step_s(2048, 2_000_000, 3, 900)
