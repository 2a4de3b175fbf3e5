"""Operators of our own, each with a fast kernel and a twin in plain PyTorch.

They exist where PyTorch has no operator for concatenated rows. The room uses only `_torch` and
`errors`, and works without the rest of the package. Begin with `segments/`.
"""
