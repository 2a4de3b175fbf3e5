"""Programs: the graphs that a checkpoint runs forward and backward, and its residuals.

A program is a joint graph with the decisions of a policy. It may use `offload` beside it, but
no trace of a user's function and no autograd function. Begin with `program.py`, then
`decisions.py`.
"""
