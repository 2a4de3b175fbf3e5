"""The checkpoint: the forward pass saves residuals, the backward recomputes the rest.

It joins a traced call, a policy and an autograd operator, each in a room inside. It uses all
rooms below, and no report, plan or compiler. Begin with `checkpoint.py`, then
`checkpointed.py`, which runs at each call.
"""
