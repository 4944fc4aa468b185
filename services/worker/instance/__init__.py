"""The worker's one instance: its states, its place in the registry, and what it reports."""
