"""The queue of a pair in live scaling and its rules: the worker executes them, the planner plays them."""
