"""New passwords in three steps, while the servers run."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_args

import nats
import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from compose import passwords, private_files, rotation
from compose.children import redis_server
from compose.cli.app import run
from compose.credentials import make
from compose.errors import StackRefused
from compose.passwords import ADMIN_KEY, REDIS_PASSWORD, Login, Passwords, password_file, user_file
from compose.ports import free_port
from compose.rotation import Step
from compose.secrets_yaml import MOUNTED_AT
from compose.server_conf import NATS_CONF, REDIS_CONF, USERS_ACL
from shared import subjects
from shared.bus.access import NatsAccess
from shared.bus.nats import NatsBus
from shared.errors import NoResponder, NotPermitted
from shared.messages.common import Ack
from shared.messages.generation import Cancel
from shared.permissions import USERS, inbox_prefix
from tests.compose.test_secrets_yaml import secrets
from tests.servers import Server, binary

STEPS: tuple[Step, ...] = get_args(Step)


def take(folder: Path, step: Step | None, *, kubernetes: bool = False) -> None:
    make(folder, renew=False, rotate=step, kubernetes=kubernetes)


def used(folder: Path) -> Passwords:
    """What services are told."""
    found = passwords.read(folder)
    assert found is not None
    return found


def both(folder: Path) -> tuple[Passwords, Passwords]:
    found = rotation.read(folder)
    assert found is not None
    return found.old, found.new


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def refused_and_unchanged(folder: Path, step: Step | None, says: str) -> None:
    before = texts(folder)
    with pytest.raises(StackRefused, match=says):
        take(folder, step)
    assert texts(folder) == before


def known(folder: Path) -> set[str]:
    """The users that NATS's configuration names, each with a password that the folder still has elsewhere."""
    turning = rotation.read(folder)
    kept = [used(folder), *((turning.old, turning.new) if turning is not None else ())]
    logins = {login for each in kept for login in each.logins.values()}
    found = re.findall(r'user: "(.*)", password: "(.*)"', (folder / NATS_CONF).read_text())
    assert {Login(*one) for one in found} <= logins
    return {name for name, _ in found}


FIRST = set(USERS)
SECOND = {f"{user}-2" for user in USERS}


def test_servers_know_both_while_services_change(tmp_path: Path) -> None:
    make(tmp_path)
    before = used(tmp_path)
    assert known(tmp_path) == FIRST
    take(tmp_path, "add")
    assert known(tmp_path) == FIRST | SECOND
    assert used(tmp_path).logins == before.logins
    conf = (tmp_path / NATS_CONF).read_text()
    take(tmp_path, "switch")
    assert (tmp_path / NATS_CONF).read_text() == conf
    after = used(tmp_path)
    assert {login.name for login in after.logins.values()} == SECOND
    assert not [user for user in USERS if after.logins[user].password == before.logins[user].password]
    assert after.redis != before.redis
    take(tmp_path, "retire")
    assert known(tmp_path) == SECOND
    assert used(tmp_path).logins == after.logins
    for step in STEPS:
        take(tmp_path, step)
    assert known(tmp_path) == FIRST
    assert used(tmp_path).logins["pool"].password not in {each.logins["pool"].password for each in (before, after)}


def test_a_step_that_is_repeated_changes_nothing(tmp_path: Path) -> None:
    make(tmp_path)
    for step in STEPS:
        take(tmp_path, step)
        before = texts(tmp_path)
        for again in (step, None):
            take(tmp_path, again)
            assert texts(tmp_path) == before


@pytest.mark.parametrize(
    ("taken", "step", "says"),
    [
        ((), "switch", "first --rotate add"),
        (("add",), "retire", "first --rotate switch"),
        (("add", "switch"), "add", "first --rotate retire"),
        (STEPS, "switch", "first --rotate add"),
    ],
)
def test_a_step_out_of_order_is_refused_and_changes_nothing(
    tmp_path: Path, taken: tuple[Step, ...], step: Step, says: str
) -> None:
    make(tmp_path)
    for one in taken:
        take(tmp_path, one)
    refused_and_unchanged(tmp_path, step, says)


def test_all_at_once_ends_a_rotation(tmp_path: Path) -> None:
    make(tmp_path)
    take(tmp_path, "add")
    make(tmp_path, renew=True)
    assert rotation.read(tmp_path) is None
    assert known(tmp_path) == FIRST
    take(tmp_path, "add")
    (tmp_path / rotation.ROTATION).write_text("{}")
    with pytest.raises(StackRefused, match="cannot be understood"):
        take(tmp_path, None)


def test_a_name_that_is_not_the_users_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / user_file("pool")).write_text("worker-2\n")
    with pytest.raises(StackRefused, match="'worker-2' is none of pool, pool-2"):
        take(tmp_path, None)


def test_secrets_follow_and_gateways_take_both_admin_keys_meanwhile(tmp_path: Path) -> None:
    take(tmp_path, None, kubernetes=True)
    old = (tmp_path / ADMIN_KEY).read_text()
    seen = {}
    for step in STEPS:
        assert run(["credentials", str(tmp_path), "--kubernetes", "--rotate", step]) == 0
        found = secrets(tmp_path)
        seen[step] = found
        for user, login in used(tmp_path).logins.items():
            assert Login(found[user]["nats-user"], found[user]["nats-password"]) == login
        assert found["pool"]["redis-password"] == found["redis"]["redis-password"] == used(tmp_path).redis
        assert found["operator"]["admin-key"] == (tmp_path / ADMIN_KEY).read_text().strip()
    new = (tmp_path / ADMIN_KEY).read_text()
    assert [seen[step]["gateway"]["admin-keys"] for step in STEPS] == [old + new, old + new, new]
    assert [f"{seen[step]['operator']['admin-key']}\n" for step in STEPS] == [old, new, new]
    assert len({one["ca.crt"] for found in seen.values() for one in found.values()}) == 1


class Killed(BaseException):
    pass


def killed_at(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> bool:
    """Whether ``act`` came as far as changing a file for the ``number``-th time, where it ended."""
    left, replace, unlink = number, Path.replace, Path.unlink

    def end() -> None:
        nonlocal left
        if not left:
            raise Killed
        left -= 1

    def end_or_replace(self: Path, target: Path) -> Path:
        end()
        return replace(self, target)

    def end_or_unlink(self: Path, missing_ok: bool = False) -> None:
        if self.exists():
            end()
        unlink(self, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", end_or_replace)
        patch.setattr(Path, "unlink", end_or_unlink)
        try:
            act()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("kubernetes", [False, True], ids=["files", "kubernetes"])
def test_a_step_that_was_killed_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kubernetes: bool
) -> None:
    folder = tmp_path / "whole"
    make(folder, renew=False, kubernetes=kubernetes)
    for index, step in enumerate(STEPS):
        for number in range(100):
            broken = tmp_path / f"{step}-{number}"
            shutil.copytree(folder, broken)
            before = used(broken)
            if not killed_at(monkeypatch, number, lambda broken=broken, step=step: take(broken, step)):
                break
            turning, names = rotation.read(broken), {login.name for login in used(broken).logins.values()}
            assert known(broken) >= {login.name for login in before.logins.values()}
            if names & SECOND and step != "retire":
                assert turning is not None
                assert turning.step == "switch"
            if number:
                assert turning is not None
                assert (turning.step, turning.done) == (step, False)
                for other in (None, *STEPS):
                    if other != step:
                        refused_and_unchanged(broken, other, f"--rotate {step} was broken off")
            take(broken, step)
            if turning is not None:
                # What may be in use already is not made anew.
                assert used(broken).logins in (turning.old.logins, turning.new.logins)
            if step == "add":
                assert used(broken).logins == before.logins
            assert known(broken) == (FIRST | SECOND, FIRST | SECOND, SECOND)[index]
            assert not list(broken.glob(".*"))
            for later in STEPS[index + 1 :]:
                take(broken, later)
            assert known(broken) == SECOND
        assert number > 15
        take(folder, step)


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private_files.write(tmp_path / "file", "old", 0o600)
    assert killed_at(monkeypatch, 0, lambda: private_files.write(tmp_path / "file", "new", 0o600))
    assert (tmp_path / "file").read_text() == "old"
    private_files.write(tmp_path / "file", "newer", 0o600)
    assert texts(tmp_path) == {"file": "newer"}


def test_a_first_authority_that_was_killed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "whole")
    for renew in (False, True):
        for number in range(100):
            broken = tmp_path / f"{renew}-{number}"
            shutil.copytree(tmp_path / "whole", broken)

            def make_secrets(folder: Path = broken, renew: bool = renew) -> None:
                make(folder, renew=renew, kubernetes=True)

            if not killed_at(monkeypatch, number, make_secrets):
                break
            take(broken, None, kubernetes=True)
            assert {one["ca.crt"] for one in secrets(broken).values()} == {(broken / "ca.crt").read_text()}
        take(tmp_path / "whole", None, kubernetes=True)


async def takes(url: str, login: Login) -> bool:
    """Whether the server lets this user in. One that reads its configuration may hang up, and is asked again."""
    async with asyncio.timeout(90):
        while True:
            try:
                client = await nats.connect(
                    url,
                    user=login.name,
                    password=login.password,
                    inbox_prefix=inbox_prefix("gateway"),
                    allow_reconnect=False,
                    error_cb=_ignore,
                )
            except nats.errors.Error:
                return False
            except OSError:
                await asyncio.sleep(0.05)
            else:
                await client.close()
                return True


async def _ignore(error: Exception) -> None:
    del error


async def until(answer: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(90):
        while not await answer():
            await asyncio.sleep(0.05)


async def ask(bus: NatsBus) -> None:
    """A gateway's question, which the server lets through to nobody."""
    with pytest.raises(NoResponder):
        await bus.request(subjects.pool("snapshot"), Cancel(request_id="r", attempt=0), Ack, timeout_s=60)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    make(tmp_path)
    port = free_port()
    where = ["-a", "127.0.0.1", "-p", str(port), "-sd", str(tmp_path / "store")]
    server = Server([binary("nats-server"), "-c", str(tmp_path / NATS_CONF), *where], port, "nats", lambda port: False)
    server.start(wait_for_greeting=False)
    yield server
    server.stop()


async def connect(server: Server, login: Login) -> NatsBus:
    """A server that reads its configuration refuses who has not said yet who he is, and takes him a moment later."""
    async with asyncio.timeout(90):
        while True:
            try:
                access = NatsAccess(user=login.name, password=login.password)
                return await NatsBus.connect(server.url, name="gateway", access=access)
            except NotPermitted:
                await asyncio.sleep(0.05)


@pytest.mark.stack
async def test_no_service_loses_its_connection(tmp_path: Path, server: Server) -> None:
    before = await connect(server, used(tmp_path).logins["gateway"])
    connected_since_s = before.connected_since_s
    take(tmp_path, "add")
    server.reload()
    old, new = (each.logins["gateway"] for each in both(tmp_path))
    for login in (new, old):
        await until(lambda login=login: takes(server.url, login))
    take(tmp_path, "switch")
    after = await connect(server, used(tmp_path).logins["gateway"])
    for bus in (before, after):
        await ask(bus)
    await until(lambda: takes(server.url, old))
    assert before.connected_since_s == connected_since_s
    await before.close()
    connected_since_s = after.connected_since_s
    take(tmp_path, "retire")
    server.reload()
    await until(lambda: refuses(server.url, old))
    await until(lambda: takes(server.url, new))
    assert not await takes(server.url, old)
    await ask(after)
    assert after.connected_since_s == connected_since_s
    await after.close()


async def refuses(url: str, login: Login) -> bool:
    return not await takes(url, login)


@asynccontextmanager
async def running_redis(conf: Path) -> AsyncIterator[int]:
    port = free_port()
    where = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(conf.parent)]
    server = Server([str(redis_server()), str(conf), *where], port, "redis", lambda port: False)
    server.start(wait_for_greeting=False)
    yield port
    server.stop()


async def opens(port: int, password: str) -> bool:
    client = redis.asyncio.Redis(port=port, password=password, retry=Retry(NoBackoff(), 0))
    try:
        return bool(await client.ping())
    except RedisError:
        return False
    finally:
        await client.aclose()


@pytest.mark.stack
async def test_redis_takes_both_passwords_once_it_was_restarted(tmp_path: Path) -> None:
    make(tmp_path)
    for step in STEPS:
        turning = rotation.read(tmp_path)
        take(tmp_path, step)
        turning = rotation.read(tmp_path) or turning
        assert turning is not None
        old, new = turning.old.redis, turning.new.redis
        async with running_redis(tmp_path / REDIS_CONF) as port:
            assert await opens(port, old) is (step != "retire")
            assert await opens(port, new)
            assert not await opens(port, "")
            assert not await opens(port, "wrong")
        assert (tmp_path / REDIS_PASSWORD).read_text().strip() == (old if step == "add" else new)


@pytest.mark.stack
async def test_redis_of_a_pod_reads_its_passwords_again_while_it_runs(tmp_path: Path) -> None:
    folder, pod = tmp_path / "credentials", tmp_path / "pod"
    pod.mkdir()
    take(folder, None, kubernetes=True)

    def mount() -> None:
        found = secrets(folder)["redis"]
        (pod / USERS_ACL).write_text(found["users.acl"])
        # The Redis of tests has no TLS.
        lines = [line for line in found["redis.conf"].splitlines() if not line.startswith(("port 0", "tls-"))]
        assert f"aclfile {MOUNTED_AT}/users.acl" in lines
        (pod / REDIS_CONF).write_text("\n".join(lines).replace(MOUNTED_AT, str(pod)) + "\n")

    mount()
    first = used(folder).redis
    async with running_redis(pod / REDIS_CONF) as port:
        assert await opens(port, first)
        client = redis.asyncio.Redis(port=port, password=first)
        for step in STEPS:
            take(folder, step)
            mount()
            await client.acl_load()
            assert await opens(port, first) is (step != "retire")
            if step != "add":
                assert await opens(port, used(folder).redis)
        assert not await opens(port, "")
        await client.aclose()


def test_the_files_that_services_read_name_the_new_user(tmp_path: Path) -> None:
    make(tmp_path)
    for step in STEPS[:2]:
        take(tmp_path, step)
    new = both(tmp_path)[1].logins["worker"]
    assert (tmp_path / user_file("worker")).read_text() == "worker-2\n"
    assert (tmp_path / password_file("worker")).read_text() == f"{new.password}\n"
