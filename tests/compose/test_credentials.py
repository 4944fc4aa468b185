"""Passwords and server configuration, as files."""

from __future__ import annotations

import hashlib
import stat
import subprocess
from pathlib import Path

import pytest

from compose import passwords
from compose.children import nats_server
from compose.cli.app import run
from compose.credentials import files_of_credentials, make
from compose.errors import StackRefused
from compose.passwords import CLUSTER_PASSWORD, REDIS_PASSWORD, password_file
from compose.rotation import Rotation
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


def test_what_is_shown_of_passwords_has_none() -> None:
    made = passwords.make()
    turning = Rotation("add", made, passwords.successors(made))
    shown = repr((made, turning, NatsCluster(("a:1",), made.cluster)))
    assert "gateway-2" in shown
    for one in (turning.old, turning.new):
        assert not [text for name, text in passwords.texts(one).items() if "user" not in name and text in shown]
