"""Reports: what is saved, recomputed and offloaded, and why."""
