"""From a call of a checkpointed function to its trace: labels, guards, caches."""
