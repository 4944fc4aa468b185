"""With an unmodified vLLM, in its own environment (``make test-vllm``; ``BLITZ_VLLM_PYTHON`` names its interpreter)."""
