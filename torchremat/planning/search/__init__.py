"""Searches without integer programs: eviction, minimum cuts, local moves, a backward search.
They use `problem` alone, and a clock that limits them. Begin with `incumbent.py`, which keeps
the best schedule and bound so far, then `local_search.py`.
"""
