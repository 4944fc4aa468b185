"""OpenMetrics, for those who accept it."""

from __future__ import annotations

from prometheus_client.exposition import choose_encoder

_MEDIA_TYPE = "application/openmetrics-text"
OPENMETRICS = f"{_MEDIA_TYPE}; version=1.0.0; escaping=allow-utf-8"
"""As the client library is asked: without ``escaping`` it writes ``vllm_`` for ``vllm:``, other than in plain text."""
openmetrics_text, OPENMETRICS_TYPE = choose_encoder(OPENMETRICS)
"""A registry's metrics, and the content type."""


def accepts_openmetrics(accept: str) -> bool:
    """Whether a request with that header does."""
    return _MEDIA_TYPE in accept
