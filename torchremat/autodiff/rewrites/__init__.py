"""Exact rewrites of joint graphs: fewer bytes at the peak, the same bits, nothing recomputed.

Begin with `rewrite.py`, which names the rules.
"""
