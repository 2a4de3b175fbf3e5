"""A function becomes a graph: one run of it on fake tensors is recorded.

All state of torch that a trace sets and restores is handled here. The room uses `graph` and the
rooms below it, and knows no derivative and no policy. Begin with `tracing.py`;
`input_spec.py` says what a trace must know of an input.
"""
