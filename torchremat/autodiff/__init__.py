"""Derivatives from graph to graph: a function and its gradient become one joint graph.

It has no rule for any operator: autograd runs on fake tensors, and the trace records it. It uses
the tracing and graph rooms, and knows no policy. Begin with `joint.py`, then read
`partial_eval.py`, which splits the graph in two.
"""
