"""Layouts of ragged values: shared, padded or packed, with their sizes.

The rules and the interpreter pass these values around. The room uses nothing else of ragged
batching. Begin with `layouts.py`.
"""
