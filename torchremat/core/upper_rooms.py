"""Rooms that register something with a room below them, imported when they are first needed.

No room imports those above it, and `import torchremat` imports none. So whatever a lower room lets
others register has its row here, and the lower room calls `load_rooms` before it says that there
is nothing.
"""

import functools
from importlib import import_module

REGISTERING = {
    "policies": (
        "policies.builtin",
        "policies.offload",
        "planning.budget_policy",
        "planning.from_plan",
    ),
    "compilers": ("compile.lowering",),
    "shared plans": ("parallel.agreed_plan",),
    "mesh axes": ("parallel.mesh_axes",),
    "collectives over processes": ("parallel.process_axes",),
}
"""The modules that register, by what they register."""


@functools.cache
def load_rooms(what: str) -> None:
    """Import the modules that register `what`.

    >>> load_rooms("policies")
    """
    for name in REGISTERING[what]:
        import_module(f"torchremat.{name}")
