"""``blitzscale bench fleet``: many small models on few workers."""
