"""Rules for ragged operators: one file for each family of operators.

A rule takes a call with layouts and returns values with layouts. It may use `layouts` beside
it, and never the trace of an element. Begin with `op_call.py`, where rules are registered.
"""
