"""vLLM as a worker's engine. ``blitz_vllm`` is what runs in vLLM's own environment, a distribution of its own
(``pyproject.toml`` here); the rest is the worker's side of it."""
