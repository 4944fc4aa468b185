"""What one instance can do, measured with the engine and the settings of a worker: for ``blitzscale profile``. Start
at ``measure``."""
