"""One checkpointed call as graphs: forward, backward, and their derivatives."""
