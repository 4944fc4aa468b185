"""The pool's settings."""

from __future__ import annotations

import math

import pytest

from services.pool.config import PoolConfig
from services.pool.core.copies_policy import COPIES_POLICIES, KEEP_COPIES_S
from shared.settings import SettingsError


@pytest.mark.parametrize(
    "url",
    [
        "foo",
        "http://127.0.0.1:6379",
        "redis://127.0.0.1:port/0",
        "redis://:hidden@127.0.0.1/0?socket_timeout=soon",
        "redis://:hidden@127.0.0.1/0?no_such_parameter=1",
        "rediss://:hidden@127.0.0.1/0?ssl_cert_reqs=perhaps",
    ],
)
def test_a_redis_url_that_cannot_be_used_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(SettingsError, match="BLITZ_REDIS_URL cannot be used: ") as caught:
        PoolConfig.from_env({"BLITZ_REDIS_URL": url})
    assert "hidden" not in caught.value.message


@pytest.mark.parametrize("url", ["redis://127.0.0.1:6379/0", "unix:///tmp/redis.sock", "rediss://h/0?ssl_ca_certs=/a"])
def test_urls_of_every_kind_are_taken(url: str) -> None:
    assert PoolConfig.from_env({"BLITZ_REDIS_URL": url}).redis_url == url


def test_which_copies_there_are_and_for_how_long() -> None:
    plain = PoolConfig.from_env({}).pool
    assert (plain.copies, plain.keep_copies_s) == ("one", KEEP_COPIES_S)
    assert [PoolConfig.from_env({"BLITZ_POOL_COPIES": name}).pool.copies for name in COPIES_POLICIES] == [
        *COPIES_POLICIES
    ]
    kept_s = [
        PoolConfig.from_env({"BLITZ_POOL_KEEP_COPIES_S": text}).pool.keep_copies_s for text in ("0", "never", " NEVER")
    ]
    assert kept_s == [0.0, math.inf, math.inf]
    for bad in ({"BLITZ_POOL_COPIES": "two"}, {"BLITZ_POOL_KEEP_COPIES_S": "-1"}, {"BLITZ_POOL_KEEP_COPIES_S": "inf"}):
        with pytest.raises(SettingsError, match="BLITZ_POOL_"):
            PoolConfig.from_env(bad)
    with pytest.raises(SettingsError, match="BLITZ_POOL_KEEP_COPIES_S='soon': must be a number, or never"):
        PoolConfig.from_env({"BLITZ_POOL_KEEP_COPIES_S": "soon"})
