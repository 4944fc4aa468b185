"""The engine's speed: next to ``transformers.generate``, layer by layer, by how tokens are chosen; its host's share."""
