"""Attention within segments of concatenated rows.

`ragged_attention.py` has the function, and `attention_ops.py` the operators. On a GPU PyTorch's
own flash kernels run; the eager twin uses the segments beside this room.
"""
