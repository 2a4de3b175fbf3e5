"""Derivatives of functions as JAX has them, and functions with rules of their own.

It turns `grad`, `vjp`, `jvp`, `linearize`, `custom_jvp` and `custom_vjp` into calls of autograd
and `torch.func`. Begin with `gradients.py`; custom rules begin in `rules.py`.
"""
