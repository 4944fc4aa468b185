"""Compiling FlashInfer's kernels before anybody needs them: ``python -m compose.kernels``."""
