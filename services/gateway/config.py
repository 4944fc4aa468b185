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
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may use ``/v1`` from a browser; ``*`` is all."""
    max_queued_requests: int = 1024
    """Requests waiting here per model."""
    queue_timeout_s: float = 120.0
    """Longest wait for an instance."""
    no_room_timeout_s: float = 10.0
    """The same where, for as long, the planner can start none."""
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
    """Bodies being read and prompts of requests that have not ended, together. No key, or address without one,
    occupies more than it leaves free."""
    response_memory_bytes: int = 128 * 1024 * 1024
    """What waits to be sent to clients, together."""
    slow_reader_bytes: int = 1024 * 1024
    """What may wait for a client that does not read."""
    tokenizer_memory_bytes: int = 512 * 1024 * 1024
    """Loaded tokenizers, by estimate; the least recently used are dropped first."""
    tokenizer_idle_s: float = 900.0
    """A tokenizer that was not used for this long is dropped, unless half of their memory is free."""
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

        def count(key: str, value: int, *, unit: int = 1, least: int = 1, most: int | None = None) -> int:
            return unit * env.integer(key, default=value // unit, minimum=least, maximum=most)

        def seconds(key: str, value: float, *, least: float = 0.1) -> float:
            return env.duration_s(key, default=value, minimum=least)

        return cls(
            **process_settings(env),
            host=env.text("BLITZ_GATEWAY_HOST", default=default.host),
            port=count("BLITZ_GATEWAY_PORT", default.port, least=0, most=65535),
            gateway_id=gateway_id,
            api_keys=env.listing("BLITZ_API_KEYS", default=()),
            keys_file=env.text("BLITZ_GATEWAY_KEYS_FILE", default=default.keys_file),
            admin_keys=env.listing("BLITZ_ADMIN_KEYS", default=()),
            cors_origins=env.listing("BLITZ_GATEWAY_CORS_ORIGINS", default=()),
            max_queued_requests=count("BLITZ_GATEWAY_MAX_QUEUED", default.max_queued_requests),
            queue_timeout_s=seconds("BLITZ_GATEWAY_QUEUE_TIMEOUT_S", default.queue_timeout_s),
            no_room_timeout_s=seconds("BLITZ_GATEWAY_NO_ROOM_TIMEOUT_S", default.no_room_timeout_s),
            submit_timeout_s=seconds("BLITZ_GATEWAY_SUBMIT_TIMEOUT_S", default.submit_timeout_s),
            stall_s=seconds("BLITZ_GATEWAY_STALL_S", default.stall_s),
            probe_s=seconds("BLITZ_GATEWAY_PROBE_S", default.probe_s, least=0.05),
            max_attempts=count("BLITZ_GATEWAY_MAX_ATTEMPTS", default.max_attempts),
            max_body_bytes=count("BLITZ_GATEWAY_MAX_BODY_BYTES", default.max_body_bytes, least=1024),
            max_connections=count("BLITZ_GATEWAY_MAX_CONNECTIONS", default.max_connections, least=16),
            read_timeout_s=seconds("BLITZ_GATEWAY_READ_TIMEOUT_S", default.read_timeout_s),
            send_timeout_s=seconds("BLITZ_GATEWAY_SEND_TIMEOUT_S", default.send_timeout_s),
            request_memory_bytes=count("BLITZ_GATEWAY_REQUEST_MEMORY_MIB", default.request_memory_bytes, unit=_MIB),
            response_memory_bytes=count("BLITZ_GATEWAY_RESPONSE_MEMORY_MIB", default.response_memory_bytes, unit=_MIB),
            slow_reader_bytes=count("BLITZ_GATEWAY_SLOW_READER_KIB", default.slow_reader_bytes, unit=_KIB, least=64),
            tokenizer_memory_bytes=count(
                "BLITZ_GATEWAY_TOKENIZER_MEMORY_MIB", default.tokenizer_memory_bytes, unit=_MIB
            ),
            tokenizer_idle_s=seconds("BLITZ_GATEWAY_TOKENIZER_IDLE_S", default.tokenizer_idle_s, least=1),
            drain_timeout_s=seconds("BLITZ_GATEWAY_DRAIN_TIMEOUT_S", default.drain_timeout_s, least=0.0),
        )
