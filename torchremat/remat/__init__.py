"""Rematerialisation: what the forward pass keeps, and what the backward pass computes again."""
