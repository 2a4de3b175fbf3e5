"""Functions and graphs mapped over an axis."""
