"""The gateway's settings, from the environment."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.service import ServiceConfig, process_settings
from shared.settings import Settings, SettingsError

_KIB = 1024
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """All settings with their defaults; ``from_env`` fills them from ``BLITZ_*``."""

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
    """An instance that does not accept a request within this time is suspected."""
    stall_s: float = 10.0
    """After this long without a token the gateway asks for the stream, and after as long again it gives the attempt
    up."""
    probe_s: float = 0.5
    """The gateway asks a worker that owes tokens and is silent for this long whether it is alive."""
    max_attempts: int = 5
    """Attempts per request before its client gets an error."""
    max_body_bytes: int = 8 * 1024 * 1024
    max_connections: int = 8192
    """Open connections of clients. One more closes the one that has been idle the longest."""
    read_timeout_s: float = 30.0
    """How long a request's headers, and then its body, may take to arrive."""
    send_timeout_s: float = 30.0
    """A client that reads nothing of what waits for it for this long is cut off."""
    request_memory_bytes: int = 256 * 1024 * 1024
    """Bodies being read and prompts of requests that have not ended, together."""
    response_memory_bytes: int = 128 * 1024 * 1024
    """What waits to be sent to clients, together."""
    slow_reader_bytes: int = 1024 * 1024
    """What may wait for a client that does not read."""
    tokenizer_memory_bytes: int = 512 * 1024 * 1024
    """Loaded tokenizers, by estimate; the least recently used are dropped first."""
    tokenizer_idle_s: float = 900.0
    """A tokenizer that was not used for this long is dropped."""
    drain_timeout_s: float = 60.0
    """How long streams may finish after SIGTERM."""

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
            **process_settings(env),
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
            max_connections=env.integer("BLITZ_GATEWAY_MAX_CONNECTIONS", default=default.max_connections, minimum=16),
            read_timeout_s=env.duration_s("BLITZ_GATEWAY_READ_TIMEOUT_S", default=default.read_timeout_s, minimum=0.1),
            send_timeout_s=env.duration_s("BLITZ_GATEWAY_SEND_TIMEOUT_S", default=default.send_timeout_s, minimum=0.1),
            request_memory_bytes=_MIB
            * env.integer("BLITZ_GATEWAY_REQUEST_MEMORY_MIB", default=default.request_memory_bytes // _MIB, minimum=1),
            response_memory_bytes=_MIB
            * env.integer(
                "BLITZ_GATEWAY_RESPONSE_MEMORY_MIB", default=default.response_memory_bytes // _MIB, minimum=1
            ),
            slow_reader_bytes=_KIB
            * env.integer("BLITZ_GATEWAY_SLOW_READER_KIB", default=default.slow_reader_bytes // _KIB, minimum=64),
            tokenizer_memory_bytes=_MIB
            * env.integer(
                "BLITZ_GATEWAY_TOKENIZER_MEMORY_MIB", default=default.tokenizer_memory_bytes // _MIB, minimum=1
            ),
            tokenizer_idle_s=env.duration_s(
                "BLITZ_GATEWAY_TOKENIZER_IDLE_S", default=default.tokenizer_idle_s, minimum=1
            ),
            drain_timeout_s=env.duration_s("BLITZ_GATEWAY_DRAIN_TIMEOUT_S", default=default.drain_timeout_s),
        )
