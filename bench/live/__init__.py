"""Live scaling measured: a burst on one instance, a second one that helps while it loads, against the playback."""
