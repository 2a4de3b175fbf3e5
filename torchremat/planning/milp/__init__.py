"""The planning problem as an integer program."""
