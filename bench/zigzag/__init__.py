"""How good the schedules of live scaling are, by exact playback."""
