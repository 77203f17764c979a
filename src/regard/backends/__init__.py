"""Backends: who computes what kernels describe. `torch` anywhere, `cpu` in C."""
