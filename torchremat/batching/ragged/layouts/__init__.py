"""How the values of a ragged batch are stored."""
