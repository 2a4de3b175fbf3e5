"""Derivatives of traced functions: joint graphs, partial evaluation, transformations of graphs."""
