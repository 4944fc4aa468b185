"""Models on kinds of GPUs, and clusters whose GPUs are joined for them."""

from __future__ import annotations

import pytest

from bench.sim.cluster import known_cluster
from bench.sim.models import MODELS, known_model
from shared.errors import BadRequest, BadTopology


@pytest.mark.parametrize(("name", "degree"), [(name, d) for name, known in MODELS.items() for d in known.objectives])
@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_every_model_has_a_profile_of_its_own_bytes(name: str, degree: int, gpu: str) -> None:
    model = known_model(name, gpu, degree=degree)
    assert model.degree == degree
    assert model.record.weights_bytes == pytest.approx(model.profile.weights_bytes, rel=0.001)
    assert model.kv_bytes_per_token == model.profile.kv_bytes_per_token
    ends = model.weights.layer_ends
    assert len(ends) == model.record.spec.num_layers
    assert list(ends) == sorted(ends)
    assert 0 < ends[0] < ends[-1] <= 1


@pytest.mark.parametrize(
    ("name", "degree", "gpu", "said"),
    [
        ("gpt-5", None, "a100", "no model 'gpt-5': there are llama3-8b"),
        ("llama3-8b", 3, "a100", "llama3-8b on 3 GPUs has no profile"),
        ("llama3-8b", None, "tpu", "no profile of llama-3-8b on 1 'tpu'"),
    ],
)
def test_what_is_not_known_is_named(name: str, degree: int | None, gpu: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        known_model(name, gpu, degree=degree)


def test_four_joined_gpus_have_four_links() -> None:
    cluster = known_cluster("a")
    joined = cluster.joined(4)
    assert (joined.gpus_per_host, joined.gpus_per_domain, joined.nics_per_host) == (2, 2, 2)
    assert (joined.nic_gbps, joined.scale_up_gbps) == (4 * cluster.nic_gbps, 4 * (cluster.scale_up_gbps or 0))
    assert (joined.host_link_gbps, joined.ssd_gbps) == (4 * cluster.host_link_gbps, 4 * cluster.ssd_gbps)
    assert cluster.joined(8).scale_up_gbps is None, "one alone has nobody to reach"
    assert cluster.joined(1) is cluster
    with pytest.raises(BadTopology, match="not joined 3 at a time"):
        cluster.joined(3)
