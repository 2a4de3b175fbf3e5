"""The operator `remat_p` and its rules: one for each transformation.

Autograd and `torch.func` see a program as one differentiable operator. It uses `program`,
`offload` and `tracing` beside it. Begin with `remat_op.py`, then `autograd_functions.py`.
"""
