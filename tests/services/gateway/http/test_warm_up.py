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
from services.gateway.http.preparation import warm_up
from services.gateway.request_bodies.body import read_body
from services.gateway.request_bodies.chat_request import ChatBody, read_chat_request
from services.gateway.request_bodies.completion_request import CompletionBody, read_completion_request

kind = sys.argv[1]
warm_up(ChatEndpoint() if kind == "chat" else CompletionEndpoint())
msgspec.json.Decoder = msgspec.defstruct = None
limits = {"vocab_size": 10, "max_prompt_bytes": 100}
if kind == "chat":
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": true}'
    read_chat_request(raw, read_body(raw, ChatBody), **limits)
else:
    for raw in (b'{"model": "m", "prompt": "hello", "logprobs": 1}', b'{"model": "m", "prompt": [1, 2], "seed": 3}'):
        read_completion_request(raw, read_body(raw, CompletionBody), **limits)
"""


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_after_the_warm_up_a_body_makes_no_decoder(kind: str) -> None:
    """In a process of its own: other tests' bodies would have made them."""
    command = [sys.executable, "-c", SCRIPT, kind]
    found = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (found.returncode, found.stderr) == (0, "")
