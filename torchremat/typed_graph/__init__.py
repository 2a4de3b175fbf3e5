"""Typed graphs: `TypedGraph`, which prints like a jaxpr, and functions on it.

A typed graph gives each value a short name and an aval. The room uses `tracing` to evaluate a
graph, and knows no policy. Begin with `typed_graph.py`, then `printing.py`.
"""
