"""The gateway's settings, from the environment."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """All settings with their defaults; ``read_config`` fills them from ``BLITZ_*``."""

    nats_url: str = "nats://127.0.0.1:4222"
    host: str = "127.0.0.1"
    port: int = 8000
    gateway_id: str = field(default_factory=lambda: f"gw-{secrets.token_hex(4)}")
    api_keys: tuple[str, ...] = ()
    """Bearer keys for ``/v1``; none leaves it open."""
    admin_keys: tuple[str, ...] = ()
    """Bearer keys for ``/admin``; none admits clients of the loopback interface only."""
    max_queued_requests: int = 1024
    """Requests waiting here per model."""
    queue_timeout_s: float = 120.0
    """Longest wait for an instance."""
    submit_timeout_s: float = 2.0
    """An instance that does not accept a request within this is suspected."""
    stall_s: float = 10.0
    """A stream without a token for this long is asked for, and after as long again given up."""
    probe_s: float = 1.0
    """A worker that is silent for this long while it owes tokens is asked whether it lives."""
    max_attempts: int = 5
    """Attempts per request before its client gets an error."""
    max_body_bytes: int = 8 * 1024 * 1024
    drain_timeout_s: float = 60.0
    """How long streams may finish after SIGTERM."""
    log_level: str = "INFO"
    die_with_parent: bool = False
