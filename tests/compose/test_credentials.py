"""Passwords and server configuration, as files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import subprocess
import time
from pathlib import Path

import pytest

from compose import deployment, passwords, private_files
from compose.children import nats_server
from compose.cli.app import run
from compose.credentials import files_of_credentials, make
from compose.deployment import DEPLOYMENT, Deployment
from compose.errors import StackRefused
from compose.passwords import CLUSTER_PASSWORD, REDIS_PASSWORD, password_file
from compose.rotation import Rotation
from compose.secrets_yaml import NATS_MEMBERS, SECRETS_YAML
from compose.server_conf import NATS_CONF, REDIS_CONF, NatsCluster
from shared.permissions import USERS


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_their_owner_can_read_them(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    folder.mkdir(mode=0o755)
    (folder / NATS_CONF).write_text("of before")
    (folder / NATS_CONF).chmod(0o644)
    make(folder)
    assert mode(folder) == 0o700
    assert {path.name for path in folder.iterdir()} == set(files_of_credentials())
    assert {mode(path) for path in folder.iterdir()} == {0o600}


def test_each_user_has_a_password_that_nobody_else_has(tmp_path: Path) -> None:
    make(tmp_path, cluster=("nats-0:6222",))
    found = [(tmp_path / password_file(user)).read_text().strip() for user in USERS]
    found.append((tmp_path / CLUSTER_PASSWORD).read_text().strip())
    found.append((tmp_path / REDIS_PASSWORD).read_text().strip())
    assert len(set(found)) == len(found)
    assert min(map(len, found)) >= 40
    nats, redis = (tmp_path / NATS_CONF).read_text(), (tmp_path / REDIS_CONF).read_text()
    assert all(password in nats for password in found[:-1])
    assert f"#{hashlib.sha256(found[-1].encode()).hexdigest()} " in redis
    assert not [password for password in found if password in redis]
    assert found[-1] not in nats
    make(tmp_path)
    assert (tmp_path / REDIS_CONF).read_text() != redis


@pytest.mark.parametrize("cluster", [(), ("nats-0:6222", "nats-1:6222", "[fd00::1]:6222")])
def test_the_server_takes_its_configuration(tmp_path: Path, cluster: tuple[str, ...]) -> None:
    make(tmp_path, http="127.0.0.1:8222", cluster=cluster)
    checked = subprocess.run(
        [str(nats_server()), "-t", "-c", str(tmp_path / NATS_CONF)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("member", ["nats-0", "nats-0:", "", 'nats-0:6222", "x'])
def test_what_is_no_server_of_a_cluster_is_refused_and_nothing_is_written(tmp_path: Path, member: str) -> None:
    with pytest.raises(StackRefused, match="HOST:PORT"):
        make(tmp_path / "credentials", cluster=("nats-0:6222", member))
    assert not (tmp_path / "credentials").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StackRefused, match="cannot be written"):
        make(tmp_path / "file" / "credentials")


def test_the_command_makes_them_for_containers_and_replaces_them_only_if_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "credentials"
    assert run(["credentials", str(folder)]) == 0
    printed = capsys.readouterr().out.split()
    assert printed == [str(folder / name) for name in files_of_credentials()]
    # A container's user reads the files that are mounted; the folder is closed to everybody else on the host.
    assert mode(folder) == 0o700
    assert {mode(path) for path in folder.iterdir()} == {0o444}
    before = (folder / NATS_CONF).read_text()
    assert "127.0.0.1:8222" in before
    (folder / NATS_CONF).chmod(0o600)
    (folder / NATS_CONF).write_text("of the version before")
    assert run(["credentials", str(folder)]) == 0
    assert (folder / NATS_CONF).read_text() == before
    assert {mode(path) for path in folder.iterdir()} == {0o444}
    assert run(["credentials", str(folder), "--renew"]) == 0
    assert (folder / NATS_CONF).read_text() != before


def test_passwords_of_which_some_are_missing_are_not_mixed_with_new_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    (tmp_path / password_file("pool")).unlink()
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert run(["credentials", str(tmp_path)]) == 1
    assert "no nats-pool.password: --renew" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_folder_from_before_there_were_clusters_keeps_its_passwords_and_gets_what_it_lacks(tmp_path: Path) -> None:
    make(tmp_path)
    before = (tmp_path / password_file("worker")).read_text()
    (tmp_path / CLUSTER_PASSWORD).unlink()
    make(tmp_path, renew=False, cluster=("nats-0:6222",))
    assert (tmp_path / password_file("worker")).read_text() == before
    assert (tmp_path / CLUSTER_PASSWORD).read_text().strip() in (tmp_path / NATS_CONF).read_text()


PORTS = ("one:6222", "two:6223", "three:6224")


def nats_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("nats*.conf")}


@pytest.mark.parametrize("cluster", [PORTS, ("one:6222", "two:6222"), ()])
def test_later_calls_write_the_configuration_of_the_same_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: tuple[str, ...]
) -> None:
    assert run(["credentials", str(tmp_path), f"--cluster={','.join(cluster)}"]) == 0
    names = set(nats_files(tmp_path))
    assert len(names) == (3 if cluster == PORTS else 1)
    for step in ((), ("--rotate", "add"), ("--rotate", "switch"), ("--rotate", "retire"), ("--renew",), ()):
        assert run(["credentials", str(tmp_path), *step]) == 0
        found = nats_files(tmp_path)
        assert set(found) == names
        for text in found.values():
            assert re.findall(r'@([^"]+)"', text.partition("routes")[2].partition("\n")[0]) == list(cluster)
            assert ('user: "worker-2"' in text) is (step[-1:] in {("add",), ("switch",), ("retire",)})
    assert {f"{tmp_path / name}" for name in names} <= set(capsys.readouterr().out.split())


def test_servers_change_before_and_after_a_rotation_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path)
    assert run(["credentials", folder, "--cluster", "a:1"]) == 0
    assert run(["credentials", folder, "--cluster", "a:1,b:1"]) == 0
    kept = deployment.read(tmp_path)
    assert kept == Deployment(("a:1", "b:1"))
    for step in ("add", "switch", "retire"):
        before = {path.name: path.read_text() for path in tmp_path.iterdir()}
        for option in ("--cluster=a:1", "--cluster=", "--kubernetes"):
            for amid in ([], ["--rotate", step]):
                if step == "add" and not amid:
                    continue
                assert run(["credentials", folder, option, *amid]) == 1
                assert f"{option.partition('=')[0]}: other servers run" in capsys.readouterr().err
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
        assert run(["credentials", folder, "--rotate", step, "--cluster", "a:1,b:1"]) == 0
    assert deployment.read(tmp_path) == kept
    assert run(["credentials", folder, "--cluster="]) == 0
    assert deployment.read(tmp_path) == Deployment()
    assert run(["credentials", folder, "--rotate", "add"]) == 0
    assert run(["credentials", folder, "--renew", "--cluster", "c:1"]) == 0
    assert deployment.read(tmp_path) == Deployment(("c:1",))


def test_the_namespace_is_kept_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path)
    assert run(["credentials", folder, "--namespace", "prod"]) == 1
    assert "give --kubernetes as well" in capsys.readouterr().err
    assert run(["credentials", folder, "--kubernetes", "--namespace", "prod", "--cluster="]) == 0
    assert run(["credentials", folder, "--rotate", "add"]) == 0
    assert deployment.read(tmp_path) == Deployment((), "prod")
    texts = (tmp_path / SECRETS_YAML).read_text()
    assert texts.count('  namespace: "prod"') == texts.count("  namespace: ")
    assert run(["credentials", folder, "--rotate", "switch", "--namespace", "other"]) == 1
    assert "--namespace: other servers run (--namespace=prod)" in " ".join(capsys.readouterr().err.split())
    for step in ("switch", "retire"):
        assert run(["credentials", folder, "--rotate", step]) == 0
    assert run(["credentials", folder, "--namespace", "other"]) == 0
    assert deployment.read(tmp_path) == Deployment((), "other")


def test_for_kubernetes_servers_are_three_at_first_but_not_in_place_of_those_that_were_named(tmp_path: Path) -> None:
    for name, first, members in (("none", (), NATS_MEMBERS), ("named", ("--cluster", "a:1"), ("a:1",))):
        folder = tmp_path / name
        for arguments in (first, ("--kubernetes",)):
            assert run(["credentials", str(folder), *arguments]) == 0
        assert deployment.read(folder) == Deployment(members, "blitzscale")


def test_a_record_that_cannot_be_understood_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / DEPLOYMENT).write_text("{")
    with pytest.raises(StackRefused, match="remove it, and give --cluster"):
        make(tmp_path, renew=False)


def test_a_second_run_leaves_the_first_ones_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    monkeypatch.setattr(private_files, "TRIES", 2)
    monkeypatch.setattr(private_files, "PAUSE_S", 0)
    replace, refused = Path.replace, []

    def replace_after_another(self: Path, target: Path) -> Path:
        with pytest.raises(StackRefused, match="another process is writing") as caught:
            make(tmp_path, renew=True)
        refused.append(str(caught.value))
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_after_another)
        make(tmp_path, renew=True)
    assert len(refused) >= len(files_of_credentials())
    assert not [text for text in refused if "\n" in text]
    nats = (tmp_path / NATS_CONF).read_text()
    assert not [user for user in USERS if (tmp_path / password_file(user)).read_text().strip() not in nats]
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    make(tmp_path, renew=False)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_second_run_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as first:
        first.enter_context(private_files.alone(tmp_path))
        # The first one ends while the second sleeps.
        monkeypatch.setattr(time, "sleep", lambda _seconds: first.close())
        make(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(files_of_credentials())


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    replace, fsync = Path.replace, os.fsync

    def noted_fsync(fd: int) -> None:
        seen.append(f"{os.fstat(fd).st_size} bytes")
        fsync(fd)

    def noted_replace(self: Path, target: Path) -> Path:
        seen.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    private_files.write(tmp_path / "file", "text", 0o600)
    assert seen == ["4 bytes", "replace"]


def test_what_is_shown_of_passwords_has_none() -> None:
    made = passwords.make()
    turning = Rotation("add", made, passwords.successors(made))
    shown = repr((made, turning, NatsCluster(("a:1",), made.cluster)))
    assert "gateway-2" in shown
    for one in (turning.old, turning.new):
        assert not [text for name, text in passwords.texts(one).items() if "user" not in name and text in shown]
