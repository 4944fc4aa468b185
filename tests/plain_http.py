"""HTTP clients for servers of this machine: without the certificates, whose reading takes longer than most tests."""

from __future__ import annotations

from typing import Any

import httpx
from openai import AsyncOpenAI


def http_client(**settings: Any) -> httpx.AsyncClient:
    """A client of its own; settings as of ``httpx.AsyncClient``."""
    return httpx.AsyncClient(verify=False, **settings)


def openai_client(url: str, *, timeout_s: float = 240.0) -> AsyncOpenAI:
    """The ``openai`` client as it comes, without retries, for a gateway's URL."""
    plain = http_client(timeout=timeout_s, follow_redirects=True)
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s, http_client=plain)
