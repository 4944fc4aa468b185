"""The gateway's settings, from the environment."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.settings import Settings, SettingsError


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """All settings with their defaults; ``from_env`` fills them from ``BLITZ_*``."""

    nats_url: str = "nats://127.0.0.1:4222"
    host: str = "127.0.0.1"
    port: int = 8000
    gateway_id: str = field(default_factory=lambda: f"gw-{secrets.token_hex(4)}")
    api_keys: tuple[str, ...] = ()
    """Bearer keys for ``/v1``; none leaves it open."""
    keys_file: str = ""
    """More keys for ``/v1``, with limits; read again when it changes. Empty: none."""
    admin_keys: tuple[str, ...] = ()
    """Bearer keys for ``/admin``; none admits clients of the loopback interface only."""
    max_queued_requests: int = 1024
    """Requests waiting here per model."""
    queue_timeout_s: float = 120.0
    """Longest wait for an instance."""
    submit_timeout_s: float = 5.0
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
    log_level: str = "info"
    die_with_parent: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> GatewayConfig:
        """Raises ``SettingsError`` naming the variable and its value."""
        env = Settings(environ)
        default = cls()
        gateway_id = env.text("BLITZ_GATEWAY_ID", default=default.gateway_id)
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", gateway_id):
            raise SettingsError(
                f"BLITZ_GATEWAY_ID={gateway_id!r}: use up to 64 letters, digits, '-' and '_'", param="BLITZ_GATEWAY_ID"
            )
        return cls(
            nats_url=env.text("BLITZ_NATS_URL", default=default.nats_url),
            host=env.text("BLITZ_GATEWAY_HOST", default=default.host),
            port=env.integer("BLITZ_GATEWAY_PORT", default=default.port, minimum=0, maximum=65535),
            gateway_id=gateway_id,
            api_keys=env.listing("BLITZ_API_KEYS", default=()),
            keys_file=env.text("BLITZ_GATEWAY_KEYS_FILE", default=default.keys_file),
            admin_keys=env.listing("BLITZ_ADMIN_KEYS", default=()),
            max_queued_requests=env.integer("BLITZ_GATEWAY_MAX_QUEUED", default=default.max_queued_requests, minimum=1),
            queue_timeout_s=env.duration_s(
                "BLITZ_GATEWAY_QUEUE_TIMEOUT_S", default=default.queue_timeout_s, minimum=0.1
            ),
            submit_timeout_s=env.duration_s(
                "BLITZ_GATEWAY_SUBMIT_TIMEOUT_S", default=default.submit_timeout_s, minimum=0.1
            ),
            stall_s=env.duration_s("BLITZ_GATEWAY_STALL_S", default=default.stall_s, minimum=0.1),
            probe_s=env.duration_s("BLITZ_GATEWAY_PROBE_S", default=default.probe_s, minimum=0.05),
            max_attempts=env.integer("BLITZ_GATEWAY_MAX_ATTEMPTS", default=default.max_attempts, minimum=1),
            max_body_bytes=env.integer("BLITZ_GATEWAY_MAX_BODY_BYTES", default=default.max_body_bytes, minimum=1024),
            drain_timeout_s=env.duration_s("BLITZ_GATEWAY_DRAIN_TIMEOUT_S", default=default.drain_timeout_s),
            log_level=env.text("BLITZ_LOG_LEVEL", default=default.log_level),
            die_with_parent=env.boolean("BLITZ_DIE_WITH_PARENT", default=False),
        )
