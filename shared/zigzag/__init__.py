"""Live scaling's shared rules: the queue of a pair, and how it is shared out. The worker executes them, the planner plays them."""
