"""Figures: shapes, ticks, labels and colours become SVG, PNG or a file.
It uses `errors` alone, and knows nothing of plans. Begin with `figure.py`.
"""
