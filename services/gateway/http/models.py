"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from services.gateway.core.routes import ModelRoutes
from services.gateway.service import Gateway


def models_router(gateway: Gateway) -> APIRouter:
    """The routes, bound to one gateway."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        """All registered models."""
        models = [_model_json(gateway.book.models[name]) for name in sorted(gateway.book.models)]
        return {"object": "list", "data": models}

    @router.get("/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        """One model."""
        return _model_json(gateway.find_model(name))

    return router


def _model_json(model: ModelRoutes) -> dict[str, Any]:
    record = model.record
    return {
        "id": record.name,
        "object": "model",
        "created": int(record.added_at_s),
        "owned_by": "blitzscale",
        "root": record.path,
        "parent": None,
        "max_model_len": model.context_tokens,
    }
