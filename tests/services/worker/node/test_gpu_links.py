"""NVLink, PCIe and host memory."""

from __future__ import annotations

import pytest

from services.worker.node.gpu_links import GpuLinks, load_nvml, measure_copy_gbps, read_gpu
from tests.services.worker.node.fake_nvml import FakeGpu, FakeNvml

A, B, C, D = (f"00000000:{bus}:00.0" for bus in ("1A", "2B", "3C", "4D"))


def domains(nvml: FakeNvml) -> list[str]:
    found = [read_gpu(nvml, str(index)).scale_up_domain for index in range(len(nvml.gpus))]
    assert nvml.users == 0, "every start of the library has its end"
    return found


def test_gpus_joined_directly_or_over_others_are_one_domain() -> None:
    """A - B - C in a row; D is alone."""
    nvml = FakeNvml(FakeGpu(A, links=(B,)), FakeGpu(B, links=(A, C)), FakeGpu(C, links=(B, None)), FakeGpu(D))
    a, b, c, d = domains(nvml)
    assert a == b == c != ""
    assert d == ""


def test_two_pairs_are_two_domains() -> None:
    nvml = FakeNvml(FakeGpu(A, links=(B,)), FakeGpu(B, links=(A,)), FakeGpu(C, links=(D,)), FakeGpu(D, links=(C,)))
    a, b, c, d = domains(nvml)
    assert a == b
    assert c == d
    assert a != c


def test_gpus_on_switches_are_one_domain() -> None:
    nvml = FakeNvml(*(FakeGpu(bus, links=("switch",) * 18, link_mb_per_s=26562) for bus in (A, B, C, D)))
    assert len(set(domains(nvml))) == 1
    assert domains(nvml)[0] != ""
    assert read_gpu(nvml, "0").scale_up_gbps == pytest.approx(18 * 26.562 * 8)


def test_containers_of_one_gpu_each_name_the_same_domain() -> None:
    everywhere = {A: (B, C), B: (A, C), C: (A, B)}
    alone = [domains(FakeNvml(FakeGpu(bus, links=peers)))[0] for bus, peers in everywhere.items()]
    assert len(set(alone)) == 1


def test_inactive_links_join_nothing_and_carry_nothing() -> None:
    links = read_gpu(FakeNvml(FakeGpu(A, links=(None, None)), FakeGpu(B)), "0")
    assert (links.scale_up_domain, links.scale_up_gbps) == ("", None)


def test_only_active_links_count_towards_the_bandwidth() -> None:
    nvml = FakeNvml(FakeGpu(A, links=(B, None, B, B)), FakeGpu(B, links=(A, A, A)))
    assert read_gpu(nvml, "0").scale_up_gbps == pytest.approx(3 * 25.781 * 8)


def test_a_driver_that_knows_neither_switches_nor_speeds_by_link_still_shows_peers() -> None:
    old = {90}
    nvml = FakeNvml(FakeGpu(A, links=(B,), fields=old), FakeGpu(B, links=(A,), fields=old), types=False)
    links = read_gpu(nvml, "0")
    assert links.scale_up_domain != ""
    assert links.scale_up_gbps == pytest.approx(25.781 * 8)
    assert read_gpu(FakeNvml(FakeGpu(A, links=(B,), fields=set())), "0").scale_up_gbps is None


def test_the_host_link_follows_from_generation_and_width() -> None:
    full = read_gpu(FakeNvml(FakeGpu(A, generation=4, lanes=16)), "0").host_link_gbps
    half = read_gpu(FakeNvml(FakeGpu(A, generation=4, lanes=8)), "0").host_link_gbps
    newer = read_gpu(FakeNvml(FakeGpu(A, generation=5, lanes=16)), "0").host_link_gbps
    assert full is not None
    assert 22 * 8 < full < 28 * 8, "GB/s that copies reach over PCIe 4.0 x16"
    assert half == pytest.approx(full / 2)
    assert newer == pytest.approx(full * 2, rel=0.01)


def test_a_link_that_nvml_does_not_tell_leaves_the_rest_known() -> None:
    links = read_gpu(FakeNvml(FakeGpu(A, links=("switch",), generation=None)), "0")
    assert links.host_link_gbps is None
    assert links.scale_up_gbps is not None
    assert read_gpu(FakeNvml(FakeGpu(A, generation=9)), "0").host_link_gbps is None


def test_the_gpu_is_found_by_index_or_by_the_start_of_its_uuid() -> None:
    nvml = FakeNvml(FakeGpu(A, uuid="GPU-aaaa-1"), FakeGpu(B, uuid="GPU-bbbb-2"))
    assert read_gpu(nvml, "").bus_id == read_gpu(nvml, "0").bus_id == A.lower()
    assert read_gpu(nvml, "1").bus_id == read_gpu(nvml, "GPU-bbbb").bus_id == B.lower()


@pytest.mark.parametrize("gpu", ["2", "-1", "²", "9" * 5000, "GPU-cccc", "MIG-aaaa", "none"])
def test_a_gpu_that_nvml_does_not_know_has_unknown_links(gpu: str) -> None:
    nvml = FakeNvml(FakeGpu(A, uuid="GPU-aaaa"), FakeGpu(B, uuid="GPU-bbbb"))
    assert read_gpu(nvml, gpu) == GpuLinks()
    assert nvml.users == 0


def test_a_library_that_does_not_start_leaves_everything_unknown() -> None:
    assert read_gpu(FakeNvml(FakeGpu(A), starts=False), "0") == GpuLinks()


def test_the_real_library_has_every_name_that_is_used() -> None:
    nvml = load_nvml()
    if nvml is None:
        pytest.skip("nvidia-ml-py is not installed")
    for name in (n for n in dir(FakeNvml) if n.startswith(("nvml", "NVML"))):
        assert hasattr(nvml, name), name
        if name.startswith("NVML_"):
            assert getattr(nvml, name) == getattr(FakeNvml, name)
    read_gpu(nvml, "0")


def test_a_memory_copy_has_a_plausible_speed() -> None:
    assert 1 < measure_copy_gbps(4 << 20) < 10_000
