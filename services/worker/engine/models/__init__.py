"""What the families of ``shared.models`` compute, one module each, of the same names."""
