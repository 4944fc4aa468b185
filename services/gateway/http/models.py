"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from services.gateway.core.routes import ModelRoutes
from services.gateway.http.asgi import key_of
from services.gateway.service import Gateway


def models_router(gateway: Gateway) -> APIRouter:
    """The routes, bound to one gateway."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.get("/models")
    async def list_models(request: Request) -> dict[str, Any]:
        """The registered models that the caller's key may use."""
        key = key_of(request.scope)
        names = [name for name in sorted(gateway.routes.models) if gateway.api_keys.may_use(key, name)]
        models = [_model_json(gateway, gateway.routes.models[name]) for name in names]
        return {"object": "list", "data": models}

    @router.get("/models/{name:path}")
    async def get_model(name: str, request: Request) -> dict[str, Any]:
        """One model."""
        gateway.api_keys.check_model(key_of(request.scope), name)
        return _model_json(gateway, gateway.find_model(name))

    return router


def _model_json(gateway: Gateway, model: ModelRoutes) -> dict[str, Any]:
    record = model.record
    return {
        "id": record.name,
        "object": "model",
        "created": int(record.added_at_s),
        "owned_by": "blitzscale",
        # The checkpoint's path is for administrators: see /admin/models.
        "root": record.name,
        "parent": None,
        "max_model_len": gateway.dispatcher.context_tokens(model),
    }
