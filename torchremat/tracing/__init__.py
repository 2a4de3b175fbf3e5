"""From a Python function to a graph: tracing on fake tensors."""
