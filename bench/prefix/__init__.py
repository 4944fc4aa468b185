"""``blitzscale bench prefix``: the prefix cache, and requests that are sent to where their prefix is."""
