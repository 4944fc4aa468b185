"""The planner's decisions, pure: ``operations`` use ``live``, both use ``multicast``."""
