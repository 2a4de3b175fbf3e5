"""A step at many sizes of one dimension, from few traces, and the largest size that fits.
It uses planners and traces, and wraps nothing. Begin with `largest_size.py`.
"""
