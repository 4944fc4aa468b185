"""What a GPU will run, compiled and loaded without one: ``make test-kernels``."""
