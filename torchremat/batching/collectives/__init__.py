"""Collectives over a named axis: `psum`, `all_gather`, `all_to_all` and the like.

They know axes, but not whether an axis is a batch or a group of processes. Begin with
`reduce.py` and `exchange.py`; the operators with their rules are in `collective_ops.py`.
"""
