"""Attention over paged KV: the interface (``backend``), and one file per implementation."""
