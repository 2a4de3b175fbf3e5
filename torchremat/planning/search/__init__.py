"""Searches that need no linear program."""
