"""Trainers of other libraries, with a policy or a budget: `transformers` and `lightning`.
Each has a module of its own, which imports the library; importing this package imports none.
Both share `callback.py`, the place to begin.
"""
