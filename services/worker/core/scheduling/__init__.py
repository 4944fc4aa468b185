"""Which tokens an instance computes next, for which requests, in which KV blocks: pure decisions, without clock, engine
or network. Start at ``scheduler``, and ``batching``."""
