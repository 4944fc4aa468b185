"""``blitzscale bench pd``: prefill and decode on instances of their own, against instances that do both."""
