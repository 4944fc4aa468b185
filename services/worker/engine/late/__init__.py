"""An engine that computes later than it is called, made of another one: callers are tried on a CPU."""
