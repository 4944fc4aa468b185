"""The gateway's settings, from the environment."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from typing import Any, Self

from services.gateway.core.rendezvous import CHOICES
from shared.service import ServiceConfig, process_settings
from shared.settings import Settings, SettingsError

_KIB = 1024
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """All settings with their defaults; ``read`` says what each of them means."""

    host: str = "127.0.0.1"
    port: int = 8000
    gateway_id: str = field(default_factory=lambda: f"gw-{secrets.token_hex(4)}")
    api_keys: tuple[str, ...] = ()
    keys_file: str = ""
    """Empty: none."""
    admin_keys: tuple[str, ...] = ()
    admin_keys_file: str = ""
    """Empty: none."""
    cors_origins: tuple[str, ...] = ()
    max_queued_requests: int = 1024
    queue_timeout_s: float = 120.0
    prefix_cache: bool = True
    """Whether requests may find KV of earlier ones, of models that are not set otherwise."""
    affinity_choices: int = CHOICES
    """Instances among which a prompt goes to one that had prompts like it."""
    affinity_imbalance: float = 1.5
    no_room_timeout_s: float = 10.0
    submit_timeout_s: float = 5.0
    stall_s: float = 10.0
    probe_s: float = 0.5
    max_attempts: int = 5
    max_body_bytes: int = 8 * 1024 * 1024
    max_connections: int = 8192
    read_timeout_s: float = 30.0
    send_timeout_s: float = 30.0
    request_memory_bytes: int = 256 * 1024 * 1024
    response_memory_bytes: int = 128 * 1024 * 1024
    slow_reader_bytes: int = 1024 * 1024
    tokenizer_memory_bytes: int = 512 * 1024 * 1024
    tokenizer_idle_s: float = 900.0
    drain_timeout_s: float = 60.0

    @property
    def affinity_secret(self) -> bytes:
        """The same at all gateways of a cluster: where NATS asks for no password, nothing keeps clients from it."""
        return hashlib.blake2b(f"affinity {self.nats.password}".encode(), digest_size=32).digest()

    @classmethod
    def read(cls, env: Settings) -> Self:
        """Raises ``SettingsError``."""
        default = cls()

        def count(key: str, meaning: str, value: int, *, unit: int = 1, least: int = 1, most: int | None = None) -> int:
            return unit * env.integer(key, meaning, default=value // unit, minimum=least, maximum=most)

        def seconds(key: str, meaning: str, value: float, *, least: float = 0.1) -> float:
            return env.duration_s(key, meaning, default=value, minimum=least)

        return cls(
            **process_settings(env),
            host=env.text("BLITZ_GATEWAY_HOST", "Address to listen on. The image sets 0.0.0.0.", default=default.host),
            port=count("BLITZ_GATEWAY_PORT", "Port; 0 takes a free one.", default.port, least=0, most=65535),
            gateway_id=_gateway_id(env, default.gateway_id),
            api_keys=env.listing(
                "BLITZ_API_KEYS",
                "Bearer keys for `/v1`, without limits. With neither these nor a keys file, `/v1` is open.",
                default=(),
            ),
            keys_file=env.text(
                "BLITZ_GATEWAY_KEYS_FILE",
                "More keys for `/v1`, with limits: TOML, or JSON if the name ends in `.json`; at most 10,000 keys and "
                "4 MiB. The gateway reads the file again when it changes. A bad one ends the process at its start; "
                "later, the keys read before stay in force.",
                default=default.keys_file,
            ),
            **_admin_keys(env),
            cors_origins=env.listing(
                "BLITZ_GATEWAY_CORS_ORIGINS",
                "Origins, such as `https://app.example`, whose pages may use `/v1`, `/tokenize` and "
                "`/detokenize` from a browser; `*`: all.",
                default=(),
            ),
            max_queued_requests=count(
                "BLITZ_GATEWAY_MAX_QUEUED",
                "Requests that may wait here per model; more get 429.",
                default.max_queued_requests,
            ),
            queue_timeout_s=seconds(
                "BLITZ_GATEWAY_QUEUE_TIMEOUT_S", "Longest wait for an instance; then 503.", default.queue_timeout_s
            ),
            prefix_cache=env.boolean(
                "BLITZ_GATEWAY_PREFIX_CACHE",
                "Whether requests find KV of earlier ones of their key that begin alike; models may have it off by "
                "themselves.",
                default=default.prefix_cache,
            ),
            affinity_choices=count(
                "BLITZ_GATEWAY_AFFINITY_CHOICES",
                "A prompt goes to where the last one went that begins alike; the first of them to the less loaded one "
                "of so many instances, found by a hash. 0: to the least loaded of all.",
                default.affinity_choices,
                least=0,
                most=CHOICES,
            ),
            affinity_imbalance=env.number(
                "BLITZ_GATEWAY_AFFINITY_IMBALANCE",
                "How many times the mean of outstanding tokens, the request's included, an instance may have that is "
                "chosen so.",
                default=default.affinity_imbalance,
                minimum=1.0,
            ),
            no_room_timeout_s=seconds(
                "BLITZ_GATEWAY_NO_ROOM_TIMEOUT_S",
                "The same for a model without an instance, when for as long the planner can start none and no other "
                "instance gives way; then 503 `no_capacity`. A model may have its own.",
                default.no_room_timeout_s,
            ),
            submit_timeout_s=seconds(
                "BLITZ_GATEWAY_SUBMIT_TIMEOUT_S",
                "The gateway suspects an instance that does not accept a request within this time, and sends the "
                "request elsewhere.",
                default.submit_timeout_s,
            ),
            stall_s=seconds(
                "BLITZ_GATEWAY_STALL_S",
                "The gateway asks the worker about a stream without a token for this long; after as long again, the "
                "stream continues elsewhere.",
                default.stall_s,
            ),
            probe_s=seconds(
                "BLITZ_GATEWAY_PROBE_S",
                "The gateway asks a worker that owes tokens and is silent for this long whether it is alive. After "
                "three times as long, and three unanswered questions, its requests continue elsewhere.",
                default.probe_s,
                least=0.05,
            ),
            max_attempts=count(
                "BLITZ_GATEWAY_MAX_ATTEMPTS",
                "Failed attempts per request before its client gets an error. A worker that was full, or died, does "
                "not count.",
                default.max_attempts,
            ),
            max_body_bytes=count(
                "BLITZ_GATEWAY_MAX_BODY_BYTES",
                "Largest request body, unpacked too; more gets 413.",
                default.max_body_bytes,
                least=1024,
            ),
            max_connections=count(
                "BLITZ_GATEWAY_MAX_CONNECTIONS",
                "Open connections of clients, or as many as the limit of open files leaves. One more closes the one "
                "that has been idle the longest.",
                default.max_connections,
                least=16,
            ),
            read_timeout_s=seconds(
                "BLITZ_GATEWAY_READ_TIMEOUT_S",
                "A request's headers, and then its body, must arrive within this time; so must the first request of a "
                "connection.",
                default.read_timeout_s,
            ),
            send_timeout_s=seconds(
                "BLITZ_GATEWAY_SEND_TIMEOUT_S",
                "The gateway cuts off a client that reads nothing of what waits for it for this long.",
                default.send_timeout_s,
            ),
            request_memory_bytes=count(
                "BLITZ_GATEWAY_REQUEST_MEMORY_MIB",
                "Memory for bodies being read and prompts of open requests together; more get 429. So does a client "
                "(a key, or an address without one) that would occupy more than it leaves free.",
                default.request_memory_bytes,
                unit=_MIB,
            ),
            response_memory_bytes=count(
                "BLITZ_GATEWAY_RESPONSE_MEMORY_MIB",
                "What may wait to be sent to clients together; beyond it the gateway cuts off the largest response. "
                "One that is not streamed may occupy a quarter.",
                default.response_memory_bytes,
                unit=_MIB,
            ),
            slow_reader_bytes=count(
                "BLITZ_GATEWAY_SLOW_READER_KIB",
                "What may wait for a client that does not read; then the gateway cuts it off.",
                default.slow_reader_bytes,
                unit=_KIB,
                least=64,
            ),
            tokenizer_memory_bytes=count(
                "BLITZ_GATEWAY_TOKENIZER_MEMORY_MIB",
                "Loaded tokenizers, by estimate. While half of it is free, the gateway loads them when it hears of "
                "their models, else on first use; it drops the least recently used.",
                default.tokenizer_memory_bytes,
                unit=_MIB,
            ),
            tokenizer_idle_s=seconds(
                "BLITZ_GATEWAY_TOKENIZER_IDLE_S",
                "The gateway drops a tokenizer that was not used for this long, unless half of their memory is free.",
                default.tokenizer_idle_s,
                least=1,
            ),
            drain_timeout_s=seconds(
                "BLITZ_GATEWAY_DRAIN_TIMEOUT_S",
                "How long streams may finish after SIGTERM.",
                default.drain_timeout_s,
                least=0.0,
            ),
        )


def _admin_keys(env: Settings) -> dict[str, Any]:
    plain = env.listing(
        "BLITZ_ADMIN_KEYS",
        "Bearer keys for `/admin`. With neither these nor a file of them, only clients of the loopback interface may "
        "use it.",
        default=(),
    )
    key = "BLITZ_ADMIN_KEYS_FILE"
    path = env.text(
        key,
        "File of them instead, one per line; blank lines and lines that begin with `#` say nothing. `/admin` then "
        "always requires a key. The gateway reads the file again when it changes. A bad one, or one without a key, "
        "ends the process at its start; later, the keys read before stay in force.",
        default="",
    )
    if plain and path:
        raise SettingsError(f"BLITZ_ADMIN_KEYS and {key} are both set: unset one", param=key)
    return {"admin_keys": plain, "admin_keys_file": path}


def _gateway_id(env: Settings, default: str) -> str:
    key = "BLITZ_GATEWAY_ID"
    gateway_id = env.text(
        key,
        "Up to 64 letters, digits, `-` and `_`. A gateway whose id a living gateway holds ends with exit code 1.",
        default=default,
        shown="random",
    )
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", gateway_id):
        raise SettingsError(f"{key}={gateway_id!r}: use up to 64 letters, digits, '-' and '_'", param=key)
    return gateway_id
