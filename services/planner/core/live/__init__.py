"""Live scaling: which instances work in pairs, and how a pair splits its batches."""
