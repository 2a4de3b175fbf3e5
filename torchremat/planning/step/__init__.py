"""The step between a graph and its numbers, in both directions.
A joint graph becomes a `Problem`, and a schedule of the problem becomes one of the graph. It
may use `problem` and `memory` beside it. Begin with `problem_builder.py`.
"""
