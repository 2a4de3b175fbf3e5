"""Policies: which values a checkpoint may save."""
