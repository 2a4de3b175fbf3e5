"""Values of programs, their names, and the log of what is saved."""
