"""A step as numbers: from a traced joint graph to a problem, and back."""
