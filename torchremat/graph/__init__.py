"""Graphs of ATen operators: tracing, typed graphs, checking, printing, running."""
