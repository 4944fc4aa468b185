from __future__ import annotations

import contextlib
import json
import shutil
import socket
from pathlib import Path

import pytest

from compose import preflight
from compose.config import StackConfig, default_state_dir, default_workers, inherited_environment
from compose.errors import StackRefused
from compose.ports import free_port
from compose.state_dir import StateDir
from shared.checkpoint import inspect_checkpoint
from shared.errors import BadProfile
from shared.profile import write_profile
from tests.records import profile


def config(tmp_path: Path, **settings: object) -> StackConfig:
    return StackConfig(**({"models": (), "state_dir": tmp_path, "port": 0} | settings))  # type: ignore[arg-type]


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        with pytest.raises(StackRefused, match=f"port {port} on 127.0.0.1 is in use.*--port"):
            preflight.check(config(tmp_path, port=port))


def test_an_address_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StackRefused, match=r"cannot listen on 192\.0\.2\.1 port 8123"):
        preflight.check(config(tmp_path, host="192.0.2.1", port=8123))


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "absent"):
        with pytest.raises(StackRefused, match=f"{tmp_path / name} is not a directory"):
            preflight.check(config(tmp_path, models=(tmp_path / name,)))


def test_a_bad_checkpoint_is_refused_with_file_and_tensor(tmp_path: Path, demo_model: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(demo_model, broken)
    settings = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 9}))
    with pytest.raises(StackRefused, match=r"broken cannot be served: model.safetensors: tensor model.layers.8\."):
        preflight.check(config(tmp_path, models=(broken,)))


def test_a_good_checkpoint_passes(tmp_path: Path, demo_model: Path) -> None:
    findings = preflight.check(config(tmp_path, models=(demo_model,)))
    assert findings.prefault_bytes > 20_000_000
    assert preflight.model_names((demo_model, demo_model)) == {"demo": demo_model}


def test_a_single_profile_must_be_of_what_is_served(tmp_path: Path, demo_model: Path) -> None:
    layout_hash = inspect_checkpoint(demo_model, with_hash=False).layout.hash
    file = tmp_path / "m.json"

    def check(**settings: object) -> None:
        preflight.check_profiles(config(tmp_path, models=(demo_model,), profiles=file, **settings))

    with pytest.raises(StackRefused, match="no such file"):
        check()
    file.write_bytes(b"{}")
    with pytest.raises(BadProfile, match=r"m\.json: not a"):
        check()
    write_profile(file, profile())
    with pytest.raises(BadProfile, match="another layout than demo"):
        check()
    write_profile(file, profile(layout_hash=layout_hash, engine="mock"))
    with pytest.raises(BadProfile, match="engine torch"):
        check()
    check(engine="mock")
    write_profile(file, profile(layout_hash=layout_hash, version="0.0.1"))
    with pytest.raises(BadProfile, match="version"):
        check()
    write_profile(file, profile(layout_hash=layout_hash))
    check()


def test_of_profiles_in_a_directory_services_take_what_fits(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_bytes(b"{")
    preflight.check_profiles(config(tmp_path, profiles=tmp_path))


def test_two_directories_of_one_name_are_refused(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "llama").mkdir(parents=True)
    with pytest.raises(StackRefused, match="would both be served as 'llama'"):
        preflight.model_names((tmp_path / "a" / "llama", tmp_path / "b" / "llama"))


@pytest.mark.parametrize("workers", [0, -3])
def test_fewer_than_one_worker_is_refused(tmp_path: Path, workers: int) -> None:
    with pytest.raises(StackRefused, match=f"--workers must be at least 1, not {workers}"):
        config(tmp_path, workers=workers)


def test_a_port_out_of_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StackRefused, match="--port must be between 0 and 65535, not 70000"):
        config(tmp_path, port=70000)


def test_cuda_is_refused_where_no_gpu_answers_unless_nothing_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "gpus_here", lambda: ())
    with pytest.raises(StackRefused, match="no NVIDIA driver and GPU answer on this machine"):
        preflight.check(config(tmp_path, device="cuda"))
    preflight.check(config(tmp_path, device="cuda", engine="mock"))


def test_a_state_directory_belongs_to_one_stack_at_a_time(tmp_path: Path) -> None:
    first, second = StateDir(tmp_path / "state"), StateDir(tmp_path / "state")
    first.acquire()
    with pytest.raises(StackRefused, match=r"another stack \(process \d+\) uses the state directory"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    second.release()


def test_a_new_stack_starts_without_the_former_registry_but_keeps_the_plans(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.acquire()
    (state.redis / "appendonly.aof").write_text("old")
    (state.nats / "plans").write_text("record")
    state.release()
    state.acquire()
    assert list(state.redis.iterdir()) == []
    assert (state.nats / "plans").read_text() == "record"
    state.release()


def test_a_state_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StackRefused, match="cannot be used"):
        StateDir(tmp_path / "file" / "state").acquire()


def test_a_long_path_has_no_socket(tmp_path: Path) -> None:
    assert StateDir(Path("/short")).redis_socket == Path("/short/redis/redis.sock")
    assert StateDir(tmp_path / ("x" * 100)).redis_socket is None


def test_defaults_follow_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("compose.config.num_cores", lambda: 2)
    assert default_workers() == 2
    assert config(tmp_path, workers=4).worker_threads == 1
    monkeypatch.setattr("compose.config.num_cores", lambda: 16)
    assert default_workers() == 4
    assert config(tmp_path, workers=4).worker_threads == 4
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert default_state_dir() == Path("/x/blitzscale")


def test_a_disaggregated_model_needs_two_workers(tmp_path: Path, demo_model: Path) -> None:
    one = config(tmp_path, models=(demo_model,), workers=1, served_as="disaggregated")
    with pytest.raises(StackRefused, match="1 models need 2 workers each, and there are 1: give --workers 2"):
        preflight.check(one)
    preflight.check(config(tmp_path, models=(demo_model,), workers=2, served_as="disaggregated"))


def test_more_models_than_workers_are_refused_with_the_way_out(tmp_path: Path, demo_model: Path) -> None:
    folders = []
    for name in ("one", "two", "three"):
        shutil.copytree(demo_model, tmp_path / name)
        folders.append(tmp_path / name)
    with pytest.raises(StackRefused, match="3 models need a worker each, and there are 2: give --workers 3"):
        preflight.check(config(tmp_path, models=tuple(folders), workers=2))
    preflight.check(config(tmp_path, models=tuple(folders), workers=3))
    preflight.check(config(tmp_path, models=tuple(folders), workers=2, keep_alive_s=60.0))
    with pytest.raises(StackRefused, match="--keep-alive"):
        preflight.check(config(tmp_path, models=tuple(folders), workers=2, keep_alive_s=0.0))


def test_a_wrong_log_level_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(StackRefused, match=r"--log-level must be debug, info, .*, not 'loud'"):
        config(tmp_path, log_level="loud")


def test_every_process_has_a_health_port_of_its_own_once_there_is_a_first(tmp_path: Path) -> None:
    several = config(tmp_path, pools=2, monitors=2, workers=2, env={"BLITZ_HEALTH_PORT": "9090"})
    kinds = [("pool", 0), ("pool", 1), ("planner", 0), ("monitor", 0), ("monitor", 1), ("worker", 0), ("worker", 1)]
    assert [several.health_port(*each) for each in kinds] == list(range(9090, 9090 + several.num_health_ports))
    assert several.health_port("gateway", 0) == 0
    assert config(tmp_path).health_port("worker", 1) == 0


def hold_behind_a_free_port(holder: socket.socket) -> int:
    """The free one: the system gives neither of the two to anybody else's connection meanwhile."""
    while True:
        free = free_port()
        with contextlib.suppress(OSError):
            holder.bind(("127.0.0.1", free + 1))
            holder.listen(1)
            return free


def test_a_health_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        free = hold_behind_a_free_port(holder)
        with pytest.raises(StackRefused, match=f"port {free + 1} on 127.0.0.1 is in use.*BLITZ_HEALTH_PORT"):
            preflight.check(config(tmp_path, env={"BLITZ_HEALTH_PORT": str(free)}))


def test_a_health_port_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StackRefused, match="BLITZ_HEALTH_PORT='99999'"):
        preflight.check(config(tmp_path, env={"BLITZ_HEALTH_PORT": "99999"}))


def test_a_stack_shows_its_gateway_a_key_of_the_file_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BLITZ_ADMIN_KEY", "BLITZ_ADMIN_KEYS", "BLITZ_ADMIN_KEYS_FILE"):
        monkeypatch.delenv(name, raising=False)
    stack = config(tmp_path)
    assert (stack.admin_keys, stack.own_admin_key) == ((), None)
    monkeypatch.setenv("BLITZ_ADMIN_KEY", "mine")
    assert (stack.admin_keys, stack.own_admin_key) == (("mine",), "mine")
    (tmp_path / "keys").write_text("# for all\nfirst\nmine\n")
    monkeypatch.setenv("BLITZ_ADMIN_KEYS_FILE", str(tmp_path / "keys"))
    assert (stack.admin_keys, stack.own_admin_key) == ((), "mine")
    monkeypatch.delenv("BLITZ_ADMIN_KEY")
    assert (stack.admin_keys, stack.own_admin_key) == ((), "first")


def test_paths_are_those_of_whoever_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLITZ_GATEWAY_KEYS_FILE", "keys.toml")
    monkeypatch.setenv("BLITZ_POOL_MODEL_ROOTS", f"models:{tmp_path}/more")
    environment = inherited_environment()
    assert environment["BLITZ_GATEWAY_KEYS_FILE"] == f"{tmp_path}/keys.toml"
    assert environment["BLITZ_POOL_MODEL_ROOTS"] == f"{tmp_path}/models:{tmp_path}/more"
    assert "BLITZ_WORKER_SCRATCH_DIR" not in environment
