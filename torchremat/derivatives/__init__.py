"""Derivatives of functions as JAX has them, and functions with rules of their own for them."""
