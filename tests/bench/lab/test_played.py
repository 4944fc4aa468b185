from __future__ import annotations

from pathlib import Path

import pytest

from bench.evaluate.models import MODELS, find_model
from bench.lab.played import PAPER_NIC_GBPS, Played, make_played
from shared.profile_directory import ProfileDirectory

NIC_GBPS = 0.25


def _played(name: str) -> Played:
    model = find_model(name)
    return Played.of(model.profile(), hidden_size=model.hidden_size, num_gpus=model.num_gpus, nic_gbps=NIC_GBPS)


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_kv_take_as_long_as_in_the_cluster(name: str, tmp_path: Path) -> None:
    model, played = find_model(name), _played(name)
    profile = model.profile()
    made = make_played(played, profile, tmp_path, context_tokens=16384)
    for small, large in (
        (made.weights_bytes, profile.weights_bytes),
        (made.kv_bytes_per_token, profile.kv_bytes_per_token),
    ):
        there_s = large * 8 / (PAPER_NIC_GBPS * model.num_gpus * 1e9)
        assert small * 8 / (NIC_GBPS * 1e9) == pytest.approx(there_s, rel=0.06)
    assert made.weights_bytes == pytest.approx(profile.weights_bytes / played.factor, rel=0.005)


def test_the_services_find_the_profile_with_its_times(tmp_path: Path) -> None:
    profile = find_model("llama3-8b").profile()
    made = make_played(_played("llama3-8b"), profile, tmp_path, context_tokens=16384)
    directory = ProfileDirectory(made.profiles)
    directory.look()
    (file,) = made.profiles.iterdir()
    assert file.suffix == ".json"
    from shared.checkpoint import inspect_checkpoint

    checkpoint = inspect_checkpoint(made.checkpoint)
    found = directory.find(
        model_hash=checkpoint.model_hash, layout_hash=checkpoint.layout.hash, engine="mock", device="cpu"
    )
    assert found is not None
    assert found.step_s(2048, 2_000_000, 3, 900) == profile.step_s(2048, 2_000_000, 3, 900)
