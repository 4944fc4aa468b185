"""What computes: the engine's interface (``base``), the loop that schedules, computes and samples (``loop``), and the
thread that it runs on (``thread``). ``torch_engine`` has a model; ``mock`` has none."""
