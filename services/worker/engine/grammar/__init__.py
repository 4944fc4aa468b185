"""Answers that follow a grammar: which tokens may come next."""
