"""``blitzscale bench evaluate``: the systems of an evaluation on windows of a trace, in the lab."""
