"""Weights on their way: feeds to other workers, fills from them or from disk, and copies in host memory."""
