"""Compilers: `jit`, donated inputs, the backend of `torch.compile`, graphs for inductor.
The room takes programs of `remat` and passes their graphs to a compiler. Begin with `lowering.py`,
then choose `jit/` or `dynamo/`.
"""
