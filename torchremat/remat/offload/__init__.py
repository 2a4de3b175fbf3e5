"""Copies of residuals to the host and back."""
