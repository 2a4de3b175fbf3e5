"""Derivatives of functions as JAX has them, and functions with rules of their own.

It turns `grad`, `vjp`, `jvp`, `linearize`, `custom_jvp` and `custom_vjp` into calls of autograd
and `torch.func`, and uses `remat` and the rooms below it. Begin with `gradients.py`. For custom
rules begin with `rules.py`, then `rule_dispatch.py`.
"""
