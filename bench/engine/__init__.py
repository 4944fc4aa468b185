"""Tokens per second of the engine: next to ``transformers.generate``, layer by layer, and by how tokens are chosen."""
