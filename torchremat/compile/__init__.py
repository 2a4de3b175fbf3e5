"""Compilers: `jit`, donation, the backend for `torch.compile`, graphs handed to inductor."""
