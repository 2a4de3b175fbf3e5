"""The picture as data: values, modules, operators and bytes, ready to draw.
It reads plans, reports and graphs, and knows nothing of colours or files. Begin with
`picture.py`, then `build.py`.
"""
