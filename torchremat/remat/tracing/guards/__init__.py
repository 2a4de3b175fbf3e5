"""Guards: a trace assumes that variables, modules, code and tensors are as they were.

Each guard is checked at every call. A module that is switched to `eval`, a layer that is replaced
or a global that is set is traced anew. Nothing here keeps the traced function alive.
"""
