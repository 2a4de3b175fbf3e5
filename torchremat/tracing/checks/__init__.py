"""Conditions that must hold for a function to go on: `if not valid.all(): raise ValueError(...)`.

Begin with `raising_branches.py`, which finds them in the function's code.
"""
