"""Which model has which workers, when there are not enough for all."""
