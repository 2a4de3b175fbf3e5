"""Modules during a trace: their names, their hooks, the attributes that they change.

Nothing here records operators; the tracing files around do. Begin with `module_paths.py`, which
names the module that is running.
"""
