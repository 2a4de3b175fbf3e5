"""Ragged batching: `Pile`, a batch of tensors of different sizes, and `vmap` over it.

The graph of one element is traced, then run for the whole batch node by node. It does not
import the `vmap` around it. Begin with `pile.py`, then `run.py` and `interpret.py`.
"""
