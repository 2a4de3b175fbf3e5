"""Sizes that are symbols.

`shape_env.py` makes them and tells what a trace assumes of them. `known_results.py` keeps what
operators give for arguments with such sizes.
"""
