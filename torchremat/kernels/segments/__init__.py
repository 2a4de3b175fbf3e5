"""Sums, maxima and softmax over segments of concatenated rows.

`segments.py` has the functions, and `segment_ops.py` the operators with their derivatives. Each
operator runs in Triton on a GPU and in plain PyTorch elsewhere.
"""
