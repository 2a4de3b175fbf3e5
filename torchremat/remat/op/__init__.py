"""The operator `remat_p` and its rules."""
