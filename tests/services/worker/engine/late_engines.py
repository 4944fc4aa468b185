"""Late engines, and one that waits for each of their calls, for who cannot wait yet."""

from __future__ import annotations

from typing import Any, cast

from services.worker.device.completion import Completion
from services.worker.device.late import LateStreams
from services.worker.engine.base import Engine
from services.worker.engine.late.failures import LateFailures
from services.worker.engine.late.late_engine import LateEngine
from services.worker.engine.torch_engine import TorchEngine
from tests.services.worker.device.waiting import settled

WAITED = (
    "embed",
    "embed_tokens",
    "resume",
    "run_layers",
    "run_part",
    "hidden_states",
    "export_kv",
    "import_kv",
    "score",
    "sample",
)


def late(inner: Engine, streams: LateStreams, failures: LateFailures | None = None) -> LateEngine:
    """``inner``, later."""
    return LateEngine(inner, streams, failures, cache=inner.cache if isinstance(inner, TorchEngine) else None)


class _Waiting:
    """Each call has ended when it returns, as a host's has."""

    def __init__(self, engine: LateEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._engine, name)
        if name not in WAITED:
            return method

        def waited(*given: Any, **named: Any) -> Completion[Any]:
            return settled(method(*given, **named))

        return waited


def waiting(engine: LateEngine) -> Engine:
    """``engine``, waited for at each call."""
    return cast(Engine, _Waiting(engine))
