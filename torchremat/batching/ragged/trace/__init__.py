"""The graph of one element of a ragged batch."""
