"""Ragged batching: `Pile`, a batch of tensors of different sizes, and `vmap` over it."""
