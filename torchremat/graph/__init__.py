"""Facts about fx graphs, and pure edits of them.

The functions here take a graph and read or copy it. They trace nothing, differentiate nothing
and change no state of torch. Begin with `nodes.py` for single nodes, then `aliasing.py`; the
Python code that runs a graph is made in `codegen.py`.
"""
