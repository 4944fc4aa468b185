"""HTTP clients for servers of this machine: without the certificates, whose reading takes longer than most tests."""

from __future__ import annotations

from typing import Any

import httpx
from openai import AsyncOpenAI

TIMEOUT_S = 240.0
KEPT_S = 60.0
"""By default idle connections are given up after 5 s, also one that a request has just been given, but has not begun to
use: on a busy machine it ends in a connection error."""


def http_client(**settings: Any) -> httpx.AsyncClient:
    """A client of its own; settings as of ``httpx.AsyncClient``."""
    patient = {"timeout": TIMEOUT_S, "limits": httpx.Limits(keepalive_expiry=KEPT_S)}
    return httpx.AsyncClient(verify=False, **(patient | settings))


def openai_client(url: str, *, timeout_s: float = TIMEOUT_S) -> AsyncOpenAI:
    """The ``openai`` client as it comes, without retries, for a gateway's URL."""
    plain = http_client(timeout=timeout_s, follow_redirects=True)
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s, http_client=plain)
