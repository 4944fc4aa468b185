"""``blitzscale bench vllm``, ``vllm-api`` and ``vllm-turns``: vLLM as a worker's engine, beside vLLM by itself."""
