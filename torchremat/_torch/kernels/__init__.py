"""Kernels that are put before PyTorch's own, for good or while a trace needs them.

`registered` has batching rules and the like. `gpu_choice` lets traces on the CPU take the kernels
of a GPU that is not here; the other files say which those are.
"""
