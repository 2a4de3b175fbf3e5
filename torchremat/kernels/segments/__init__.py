"""Sums, extrema and softmax over segments of rows."""
