"""Residuals in the memory of the host: copied out in the forward pass, fetched in the backward.

The room knows graphs and policies, but no program. Begin with `graph_nodes.py`, which puts
copies into graphs; `copies.py` runs them.
"""
