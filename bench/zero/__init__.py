"""How long a request waits for a model that has no instance, by where its weights come from."""
