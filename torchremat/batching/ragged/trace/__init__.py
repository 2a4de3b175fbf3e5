"""The graph of one element of a ragged batch: traced, cached, broken up for the rules.

It may use `layouts` and `rules` beside it. Begin with `element_graph.py`; errors about graphs
that cannot be mapped are in `element_errors.py`.
"""
