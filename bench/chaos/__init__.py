"""``blitzscale bench chaos``: load on a stack while its members are killed; every answer is compared."""
