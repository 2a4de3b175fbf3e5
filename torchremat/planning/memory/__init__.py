"""Memory of a step, simulated: the bytes alive at each operator without running it.
It knows graphs and programs, but no solver. Begin with `interpreter.py`, which runs graphs on
storages in place of tensors, then `simulate.py`.
"""
