"""What both sides know: the stack, in the project's environment, and the clients' tests, in theirs."""

from __future__ import annotations

KEY = "sk-of-clients"
RANDOM, SCRIPTED = "random", "scripted"
"""A tiny Llama with random weights; a model that says what it was told to (``scripted_model``)."""
