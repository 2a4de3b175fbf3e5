"""Traces that alike layers share: a trace of one serves another, with its own parameters.

`alike_modules` compares two modules in all that a trace depends on. `shared_objects` looks for ways
by which code could tell them apart. `adoption` makes the trace of one that of the other.
"""
