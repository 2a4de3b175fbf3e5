"""Several devices, of one process and of many."""
