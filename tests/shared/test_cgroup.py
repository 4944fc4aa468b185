"""GroupLimits as kernels and container engines write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.cgroup import GroupLimits, limits, memory_left, num_cores

V2 = "33 24 0:29 {of} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {of} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {of} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
V1_PATHS = "12:name=systemd:{path}\n5:memory:{path}\n4:cpu,cpuacct:{path}\n0::/\n"


def machine(root: Path, mounts: str, paths: str, **files: str) -> Path:
    """A root folder with these files; in names of ``files``, ``__`` is a slash and ``_dot_`` a dot."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(mounts)
    (root / "proc/self/cgroup").write_text(paths)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_without_control_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert limits(tmp_path) == GroupLimits(None, None)
    assert num_cores(tmp_path) >= 1


def test_of_version_2_the_narrowest_of_all_groups_around_counts(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        V2.format(of="/"),
        "0::/kubepods/pod1/worker\n",
        kubepods__cpu_dot_max="800000 100000\n",
        kubepods__pod1__cpu_dot_max="250000 100000\n",
        kubepods__pod1__worker__cpu_dot_max="max 100000\n",
        kubepods__pod1__memory_dot_max="max\n",
        kubepods__pod1__worker__memory_dot_max="1073741824\n",
        kubepods__memory_dot_max="9073741824\n",
    )
    assert limits(root) == GroupLimits(2.5, 1 << 30)


@pytest.mark.parametrize("told", ["/", "/docker/abc"])
def test_a_container_may_see_its_own_group_as_the_root(tmp_path: Path, told: str) -> None:
    """Its path is told from inside of its namespace, or as the host sees it."""
    root = machine(
        tmp_path, V2.format(of=told), f"0::{told}\n", cpu_dot_max="150000 100000", memory_dot_max="536870912"
    )
    assert limits(root) == GroupLimits(1.5, 1 << 29)


@pytest.mark.parametrize("of", ["/", "/docker/abc", "/docker/other"])
def test_version_1_has_a_group_per_controller(tmp_path: Path, of: str) -> None:
    inside = "docker/abc/" if of == "/" else ""
    root = machine(tmp_path, V1.format(of=of), V1_PATHS.format(path="/docker/abc"))
    cgroup = root / "sys/fs/cgroup"
    for name, text in (
        (f"cpu,cpuacct/{inside}cpu.cfs_quota_us", "300000\n"),
        (f"cpu,cpuacct/{inside}cpu.cfs_period_us", "100000\n"),
        (f"memory/{inside}memory.limit_in_bytes", "2147483648\n"),
    ):
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(text)
    assert limits(root) == GroupLimits(3.0, 2 << 30)


def test_version_1_writes_no_limit_as_numbers(tmp_path: Path) -> None:
    root = machine(tmp_path, V1.format(of="/"), V1_PATHS.format(path="/"))
    cgroup = root / "sys/fs/cgroup"
    for name, text in (
        ("cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
        ("cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
    ):
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(text)
    assert limits(root) == GroupLimits(None, None)


@pytest.mark.parametrize(
    ("quota", "mask", "cores"), [("250000", 8, 2), ("50000", 8, 1), ("900000", 4, 4), ("max", 3, 3)]
)
def test_whole_cores_by_quota_and_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, mask: int, cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(mask)))
    assert num_cores(machine(tmp_path, V2.format(of="/"), "0::/\n", cpu_dot_max=f"{quota} 100000")) == cores


def test_what_is_left_of_the_memory_is_that_of_the_fullest_group(tmp_path: Path) -> None:
    assert memory_left(tmp_path) == 1.0
    root = machine(
        tmp_path,
        V2.format(of="/"),
        "0::/pod/worker\n",
        pod__memory_dot_max="1000\n",
        pod__memory_dot_current="900\n",
        pod__memory_dot_stat="anon 300\ninactive_file 500\nactive_file 1\n",
        pod__worker__memory_dot_max="1000\n",
        pod__worker__memory_dot_current="750\n",
        memory_dot_max="max\n",
        memory_dot_current="99999\n",
    )
    assert memory_left(root) == pytest.approx(0.25)


def test_of_version_1_the_same(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        V1.format(of="/docker/abc"),
        V1_PATHS.format(path="/docker/abc"),
        memory__memory_dot_limit_in_bytes="1000\n",
        memory__memory_dot_usage_in_bytes="1200\n",
        memory__memory_dot_stat="cache 700\ntotal_inactive_file 600\n",
    )
    assert memory_left(root) == pytest.approx(0.4)
