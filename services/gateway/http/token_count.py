"""How many tokens a request's prompt has, as plain ASGI: nothing is generated."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from services.gateway.http.asgi import client_of, key_of, send_body
from services.gateway.http.endpoints.endpoint import Endpoint
from services.gateway.http.preparation import Preparation, read_request, warm_up
from services.gateway.service import Gateway


class TokenCount:
    """One endpoint's requests, each read and made a prompt as if it were to be answered. Errors are raised. It takes
    none of a key's tokens."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint) -> None:
        self._gateway = gateway
        self._endpoint = endpoint
        self.errors = endpoint.errors
        """What they look like here."""
        warm_up(endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        gateway.refuse_while_draining()
        gateway.api_keys.check(key_of(scope))
        with gateway.request_memory.claim(client_of(scope)) as claim:
            raw = await read_request(gateway, scope, receive, claim)
            preparation = Preparation(gateway, self._endpoint, raw)
            body, model = await preparation.read()
            gateway.api_keys.check_model(key_of(scope), model.record.name)
            prepared = await preparation.prepare(body, model)
            count = sum(len(prompt.token_ids) for prompt in prepared.prompts)
        await send_body(send, 200, msgspec.json.encode({"input_tokens": count}))
