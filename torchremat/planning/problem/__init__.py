"""The problem in numbers: operators, bytes, seconds, schedules and their costs.
Nothing here knows torch or a graph, so every search can be tested on small random problems.
Begin with `problem.py`, then `replay.py`.
"""
