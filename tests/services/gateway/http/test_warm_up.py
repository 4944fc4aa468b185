"""What reads bodies is made before the first body comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.wait_until import WAIT_S

SCRIPT = """
import sys

import msgspec

from services.gateway.http.endpoints.chat import ChatEndpoint
from services.gateway.http.endpoints.completions import CompletionEndpoint
from services.gateway.http.endpoints.messages import CountTokensEndpoint, MessagesEndpoint
from services.gateway.http.endpoints.responses import ResponsesEndpoint
from services.gateway.http.prompts import PromptLimits
from services.gateway.http.preparation import warm_up
from services.gateway.request_bodies.body import read_body

endpoints = [ChatEndpoint(), CompletionEndpoint(), ResponsesEndpoint(), MessagesEndpoint(), CountTokensEndpoint()]
endpoint = next(found for found in endpoints if found.path == sys.argv[1])
warm_up(endpoint)
msgspec.json.Decoder = msgspec.defstruct = None
for raw in map(str.encode, sys.argv[2:]):
    endpoint.read(raw, read_body(raw, endpoint.body_type), PromptLimits(10, 100))
"""


TURN = '{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": true}'
BODIES = {
    "/v1/chat/completions": [TURN],
    "/v1/completions": ['{"prompt": "hello", "logprobs": 1}', '{"prompt": [1, 2], "seed": 3}'],
    "/v1/responses": ['{"input": "hello"}', '{"input": [{"role": "user", "content": "hello"}], "stream": true}'],
    "/v1/messages": [TURN],
    "/v1/messages/count_tokens": [TURN],
}


@pytest.mark.parametrize("path", BODIES)
def test_after_the_warm_up_a_body_makes_no_decoder(path: str) -> None:
    """In a process of its own: other tests' bodies would have made them."""
    command = [sys.executable, "-c", SCRIPT, path, *BODIES[path]]
    found = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (found.returncode, found.stderr) == (0, "")
