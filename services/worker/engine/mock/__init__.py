"""An engine without a model: deterministic tokens, a timing model, and checks of everything that it is given."""
