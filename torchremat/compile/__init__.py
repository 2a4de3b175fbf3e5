"""Compilers: `jit`, donated inputs, the backend of `torch.compile`, graphs for inductor.

It takes programs of `remat` and hands their graphs to a compiler. Begin with `lowering.py`,
then choose `jit/` or `dynamo/`.
"""
