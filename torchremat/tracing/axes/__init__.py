"""Named axes, and functions run under a level of vmap that has one."""
