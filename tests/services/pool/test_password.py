"""The pool and a Redis that wants a password."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from services.pool.store import Store
from shared.errors import NotPermitted
from tests.servers import Server, redis_server


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Server]:
    server = redis_server(tmp_path, password="right")
    server.start()
    yield server
    server.stop()


async def test_with_its_password_it_answers(guarded: Server) -> None:
    store = Store.connect(guarded.url, "right")
    await store.check_password()
    await store.close()


async def test_a_password_in_the_url_wins(guarded: Server) -> None:
    store = Store.connect(guarded.url.replace("redis://", "redis://:right@"), "wrong")
    await store.check_password()
    await store.close()


@pytest.mark.parametrize(
    ("password", "said"), [(None, "Redis wants a password: set BLITZ_REDIS_PASSWORD_FILE"), ("wrong", "Redis refuses")]
)
async def test_a_refused_password_is_an_error_of_its_own(guarded: Server, password: str | None, said: str) -> None:
    store = Store.connect(guarded.url, password)
    with pytest.raises(NotPermitted, match=said) as caught:
        await store.check_password()
    assert "wrong " not in caught.value.message
    await store.close()


async def test_a_redis_that_is_away_refuses_nothing(guarded: Server) -> None:
    guarded.stop()
    store = Store.connect(guarded.url, "wrong")
    await store.check_password()
    await store.close()


async def test_a_password_is_read_again_at_every_connection(guarded: Server, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("of yesterday")
    store = Store.connect(guarded.url, "right", file)
    with pytest.raises(NotPermitted, match="Redis refuses the password"):
        await store.check_password()
    file.write_text("right\n")
    await store.check_password()
    file.write_text("")
    guarded.stop()
    with pytest.raises(RedisError):
        await store.worker_ids()
    guarded.start()
    await store.check_password()
    assert await store.worker_ids() == ()
    await store.close()


async def test_a_password_in_the_url_wins_over_a_file_and_a_user_does_not(guarded: Server, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("wrong")
    store = Store.connect(guarded.url.replace("redis://", "redis://:right@"), "wrong", file)
    await store.check_password()
    assert await store.worker_ids() == ()
    await store.close()
    file.write_text("right")
    store = Store.connect(guarded.url.replace("redis://", "redis://default@"), "wrong", file)
    await store.check_password()
    assert await store.worker_ids() == ()
    await store.close()
