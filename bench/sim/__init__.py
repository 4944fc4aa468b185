"""Serving on simulated GPUs."""
