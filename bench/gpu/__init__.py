"""What one GPU does: the measurements that the GPU backend's design rests on, and those of the product's engine on it.

``python -m bench.gpu`` needs nothing of the product's own requirements but what the row at hand measures: torch, and
per row Triton and xxhash, FlashInfer, cupy, msgspec, transformers, or ucxx. No row is imported before it runs.
"""
