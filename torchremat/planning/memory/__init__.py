"""Bytes that are alive at each operator."""
