"""Secrets for Kubernetes: each pod's has what its kind may know, and nothing else."""

from __future__ import annotations

import base64
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from compose.cli.app import run
from compose.credentials import files_for_kubernetes, files_of_credentials, make
from compose.deployment import DEPLOYMENT
from compose.errors import StackRefused
from compose.passwords import ADMIN_KEY, CLUSTER_PASSWORD, REDIS_PASSWORD, password_file, user_file
from compose.secrets_yaml import SECRETS_YAML
from compose.server_conf import CA_CERT, CA_KEY
from shared.permissions import KINDS, USERS

NATS = {"nats-user", "nats-password", "ca.crt"}
KEYS = {
    "gateway": NATS | {"admin-keys"},
    "monitor": NATS,
    "planner": NATS,
    "worker": NATS,
    "pool": NATS | {"redis-password"},
    "operator": NATS | {"admin-key"},
    "nats": {"nats.conf", "ca.crt", "tls.crt", "tls.key"},
    "redis": {"redis.conf", "users.acl", "redis-password", "ca.crt", "tls.crt", "tls.key"},
}


def documents(folder: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((folder / SECRETS_YAML).read_text()))


def secrets(folder: Path) -> dict[str, dict[str, str]]:
    """Texts by Secret and key."""
    return {
        found["metadata"]["name"]: {key: base64.b64decode(text).decode() for key, text in found["data"].items()}
        for found in documents(folder)
    }


def text(folder: Path, name: str) -> str:
    return (folder / name).read_text().strip()


def test_each_kind_of_pod_has_a_secret_with_these_keys(tmp_path: Path) -> None:
    assert run(["credentials", str(tmp_path), "--kubernetes", "--namespace", "123"]) == 0
    found = documents(tmp_path)
    assert {one["metadata"]["name"]: set(one["data"]) for one in found} == KEYS
    for one in found:
        assert (one["apiVersion"], one["kind"], one["type"]) == ("v1", "Secret", "Opaque")
        assert one["metadata"]["namespace"] == "123"
        assert one["metadata"]["labels"] == {"app.kubernetes.io/part-of": "blitzscale"}


def test_a_secret_has_what_the_folder_has(tmp_path: Path) -> None:
    make(tmp_path, renew=False, kubernetes=True)
    found = secrets(tmp_path)
    for user in USERS:
        assert found[user]["nats-user"] == text(tmp_path, user_file(user)) == user
        assert found[user]["nats-password"] == text(tmp_path, password_file(user))
    assert found["gateway"]["admin-keys"] == f"{found['operator']['admin-key']}\n"
    assert found["operator"]["admin-key"] == text(tmp_path, ADMIN_KEY)
    assert found["pool"]["redis-password"] == found["redis"]["redis-password"] == text(tmp_path, REDIS_PASSWORD)
    assert {one["ca.crt"].strip() for one in found.values()} == {text(tmp_path, CA_CERT)}


def test_no_secret_has_what_belongs_to_others(tmp_path: Path) -> None:
    make(tmp_path, renew=False, cluster=("nats-0.nats:6222",), kubernetes=True)
    found = secrets(tmp_path)
    everything = {name: "\n".join(one.values()) for name, one in found.items()}
    passwords = {name: text(tmp_path, name) for name in (*map(password_file, USERS), CLUSTER_PASSWORD)}
    for name, password in passwords.items():
        owner = next((user for user in USERS if name == password_file(user)), None)
        assert {one for one, texts in everything.items() if password in texts} == {"nats", *([owner] if owner else [])}
    redis, admin = text(tmp_path, REDIS_PASSWORD), text(tmp_path, ADMIN_KEY)
    assert {one for one, texts in everything.items() if redis in texts} == {"pool", "redis"}
    assert redis not in found["redis"]["users.acl"] + found["redis"]["redis.conf"]
    assert {one for one, texts in everything.items() if admin in texts} == {"gateway", "operator"}
    key = text(tmp_path, CA_KEY).splitlines()[1]
    assert not [one for one, texts in everything.items() if key in texts]
    keys = [found[server]["tls.key"] for server in ("nats", "redis")]
    assert [sum(key in texts for texts in everything.values()) for key in keys] == [1, 1]


def test_only_the_owner_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "credentials"
    assert run(["credentials", str(folder), "--kubernetes"]) == 0
    printed = capsys.readouterr().out.split()
    assert printed == [str(folder / name) for name in (*files_of_credentials(), *files_for_kubernetes())]
    assert {path.name for path in folder.iterdir()} == {*files_of_credentials(), *files_for_kubernetes()}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {name: stat.S_IMODE((folder / name).stat().st_mode) for name in files_for_kubernetes()}
    assert modes == {ADMIN_KEY: 0o600, CA_KEY: 0o600, CA_CERT: 0o444, SECRETS_YAML: 0o600}


def test_again_only_the_servers_certificates_are_new(tmp_path: Path) -> None:
    assert run(["credentials", str(tmp_path), "--kubernetes"]) == 0
    folder, before = {path.name: path.read_text() for path in tmp_path.iterdir()}, secrets(tmp_path)
    assert run(["credentials", str(tmp_path), "--kubernetes"]) == 0
    again, after = {path.name: path.read_text() for path in tmp_path.iterdir()}, secrets(tmp_path)
    assert {name for name in folder if folder[name] != again[name]} == {SECRETS_YAML}
    changed = {(name, key) for name, one in before.items() for key in one if one[key] != after[name][key]}
    assert changed == {(server, key) for server in ("nats", "redis") for key in ("tls.crt", "tls.key")}
    assert run(["credentials", str(tmp_path), "--kubernetes", "--renew"]) == 0
    renewed = secrets(tmp_path)
    assert not [name for name, one in renewed.items() if one["ca.crt"] == after[name]["ca.crt"]]
    assert not [user for user in USERS if renewed[user]["nats-password"] == after[user]["nats-password"]]
    assert renewed["operator"]["admin-key"] != after["operator"]["admin-key"]


def test_a_folder_of_other_deployments_becomes_one_of_kubernetes_and_not_back_by_oversight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["credentials", str(tmp_path)]) == 0
    before = {user: text(tmp_path, password_file(user)) for user in KINDS}
    for user in USERS:
        (tmp_path / user_file(user)).unlink()  # as an earlier version left it
    assert run(["credentials", str(tmp_path), "--kubernetes"]) == 0
    found = secrets(tmp_path)
    assert {user: found[user]["nats-password"] for user in KINDS} == before
    assert run(["credentials", str(tmp_path), "--rotate", "add"]) == 0
    printed = capsys.readouterr().out.split()
    assert str(tmp_path / SECRETS_YAML) in printed
    assert 'user: "pool-2"' in secrets(tmp_path)["nats"]["nats.conf"]


def test_a_folder_whose_secrets_are_of_before_there_was_a_record_is_not_guessed_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["credentials", str(tmp_path), "--kubernetes", "--namespace", "a", "--cluster", "b:1"]) == 0
    (tmp_path / DEPLOYMENT).unlink()
    found = secrets(tmp_path)
    for arguments, says in (
        ((), "give --kubernetes"),
        (("--kubernetes", "--rotate", "add"), "give --cluster (--cluster= for one server) and --namespace"),
    ):
        assert run(["credentials", str(tmp_path), *arguments]) == 1
        assert says in capsys.readouterr().err
    assert secrets(tmp_path) == found
    told = ("--kubernetes", "--namespace", "a", "--cluster", "b:1")
    assert run(["credentials", str(tmp_path), *told, "--rotate", "add"]) == 0
    assert run(["credentials", str(tmp_path), "--rotate", "switch"]) == 0


@pytest.mark.parametrize(
    ("arguments", "members"),
    [
        ((), ["nats-0.nats:6222", "nats-1.nats:6222", "nats-2.nats:6222"]),
        (("--cluster", "a:1,b:1"), ["a:1", "b:1"]),
        (("--cluster", ""), []),
        (("--cluster=",), []),
    ],
)
def test_nats_is_three_servers_unless_told_otherwise(
    tmp_path: Path, arguments: tuple[str, ...], members: list[str]
) -> None:
    assert run(["credentials", str(tmp_path), "--kubernetes", *arguments]) == 0
    conf = secrets(tmp_path)["nats"]["nats.conf"]
    assert re.findall(r'nats-route://cluster:[^@"]+@([^"]+)"', conf) == members
    assert ("cluster {" in conf) is bool(members)
    for line in (
        'http: "127.0.0.1:8222"',
        'cert_file: "/run/secrets/blitzscale/tls.crt"',
        "handshake_first: true",
        'lame_duck_duration: "30s"',
        'lame_duck_grace_period: "5s"',
    ):
        assert line in conf
    assert ("verify: true" in conf) is bool(members)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--namespace", "Big"), "'Big' is no name of a namespace"),
        (("--namespace", "x\n  y: z"), "is no name of a namespace"),
        (("--days", "0"), "for 0 days"),
        (("--days", "3651"), "for 3651 days"),
        (("--cluster", "a:1,b:2"), "the same port"),
        (("--cluster", "a"), "HOST:PORT"),
        (("--rotate", "add"), "holds no passwords to rotate"),
        (("--rotate", "add", "--renew"), "give one of them"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert run(["credentials", str(tmp_path / "credentials"), "--kubernetes", *arguments]) == 1
    assert says in capsys.readouterr().err
    assert not (tmp_path / "credentials").exists()


def test_an_authority_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    make(tmp_path, renew=False, kubernetes=True)
    make(tmp_path / "other", renew=False, kubernetes=True)
    for key in ("", (tmp_path / "other" / CA_KEY).read_text()):
        (tmp_path / CA_KEY).write_text(key)
        with pytest.raises(StackRefused, match="--renew makes another authority"):
            make(tmp_path, renew=False, kubernetes=True)
    (tmp_path / CA_KEY).unlink()
    with pytest.raises(StackRefused, match=r"ca\.key cannot be read"):
        make(tmp_path, renew=False, kubernetes=True)


def test_a_lost_authority_is_not_silently_another_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["credentials", str(tmp_path), "--kubernetes"]) == 0
    authority = (tmp_path / CA_CERT).read_text()
    for name in (CA_CERT, CA_KEY):
        (tmp_path / name).unlink()
        before = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert run(["credentials", str(tmp_path), "--kubernetes"]) == 1
        assert re.search(r"ca\.crt is lost.* --renew makes another", " ".join(capsys.readouterr().err.split()))
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    assert run(["credentials", str(tmp_path), "--renew"]) == 0
    assert {one["ca.crt"] for one in secrets(tmp_path).values()} == {(tmp_path / CA_CERT).read_text()} != {authority}


WITHOUT = """
import sys
sys.modules["cryptography"] = None
from compose.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


def test_without_the_package_for_certificates_everything_else_works(tmp_path: Path) -> None:
    def without(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT, "credentials", str(tmp_path / "credentials"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    refused = without("--kubernetes")
    assert refused.returncode == 1
    assert "pip install cryptography" in refused.stderr
    assert not (tmp_path / "credentials").exists()
    assert without().returncode == 0
