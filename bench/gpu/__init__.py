"""What one GPU does: the measurements that the GPU backend's design rests on.

``python -m bench.gpu`` needs nothing of the product's own requirements but what the row at hand measures: torch, and
per row Triton and xxhash, FlashInfer, or ucxx with msgspec. No module here imports any of them before its row runs.
"""
