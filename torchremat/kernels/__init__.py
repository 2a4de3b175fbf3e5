"""Operators of our own, where PyTorch has none: a kernel in Triton, and a twin in plain PyTorch."""
