"""Live scaling in a worker: one member of a pair (paper, section 5.2; ``docs/decisions/0013-pairs.md``)."""
