"""Plans: what is saved, recomputed or offloaded so that a step fits in so many bytes."""
