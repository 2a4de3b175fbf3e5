"""Attention within segments."""
