"""The process that a BlitzScale worker starts in vLLM's environment: ``python -m blitz_vllm SOCKET``.

It needs msgspec, which vLLM brings, and vLLM; nothing of ``services`` or ``shared``.
"""
