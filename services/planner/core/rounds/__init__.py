"""Rounds of decisions: what is wanted at one moment is decided on together."""
