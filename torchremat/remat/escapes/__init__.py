"""Traced tensors that leave a function by the side: found, taken out, and written at each call.

A function may keep a tensor in an attribute, a list, a dict or a closure. `Reach` knows what it can
reach before it runs, and `Escapes` what it wrote there. Begin with `escapes.py`.
"""
