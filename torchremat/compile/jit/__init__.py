"""`jit` and donation."""
