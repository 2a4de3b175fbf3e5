"""Calls of a user's function: flattened, traced once, and found again in a cache.

It uses `program` for the graphs of a trace. Begin with `calls.py`, then `trace_cache.py`; the
guards say whether a cached trace still holds.
"""
