"""Attention over paged KV: the interface (``base``), and one file per implementation."""
