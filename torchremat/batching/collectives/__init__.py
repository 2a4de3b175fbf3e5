"""Collectives over a named axis."""
