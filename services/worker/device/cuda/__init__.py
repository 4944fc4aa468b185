"""A GPU as a device. ``driver`` is the one place that calls CUDA, by PyTorch and CuPy."""
